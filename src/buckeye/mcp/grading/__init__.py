"""Graders that score a finished rollout: its last reply, calls, results, files and databases."""
