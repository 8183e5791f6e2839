"""Checks of an environment's rewards and tasks: content-free replies, probes, and task consistency."""
