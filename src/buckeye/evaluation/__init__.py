"""Evaluation of environments and models: rewards, baselines and scores. Training does not need it."""
