"""Isolation check: run the same tasks alone and in parallel, and compare the results."""
