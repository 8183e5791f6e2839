"""Graders: how the end of a rollout is judged without the help of its servers."""
