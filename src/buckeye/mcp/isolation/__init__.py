"""Isolation check: find state that rollouts share, by comparing rollouts that run alone and in parallel."""
