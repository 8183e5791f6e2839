"""Export of a run's rollouts to files for other tools."""
