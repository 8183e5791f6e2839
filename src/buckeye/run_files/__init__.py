"""Files of a run directory that the launcher writes and other packages read."""
