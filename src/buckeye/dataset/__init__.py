"""The `dataset` environment: rows of prompts, graded by reward functions or built-in rewards."""
