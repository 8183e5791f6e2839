"""How the reward of known recipes goes, and whether a run of one goes so too."""
