"""A run's configuration from its parts: an environment's file, tasks, a model, and where to train."""
