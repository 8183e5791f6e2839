"""Graders: they judge the end of a rollout without help from its servers."""
