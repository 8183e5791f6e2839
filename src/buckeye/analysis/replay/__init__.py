"""Steps of a run computed again: one, as a file for others, between two versions of the code, or all."""
