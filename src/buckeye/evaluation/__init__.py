"""Evaluate models, and check the rewards of environments. Training does not need this package."""
