"""Files that a trainer writes: weights, checkpoints, exports."""
