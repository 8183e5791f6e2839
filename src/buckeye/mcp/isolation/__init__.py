"""Whether rollouts see each other: the same tasks are played alone and side by side, and compared."""
