"""Compose the configuration of a run from an environment, tasks, a model and a machine."""
