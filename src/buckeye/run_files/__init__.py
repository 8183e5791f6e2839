"""The files of a run's directory that the launcher writes and everybody reads."""
