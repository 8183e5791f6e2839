"""The configuration of a run from its parts: an environment's file, tasks, a model, and a machine."""
