"""Files of a run directory that the launcher writes and all other rooms read."""
