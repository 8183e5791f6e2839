"""Rollouts of a run as files for other tools."""
