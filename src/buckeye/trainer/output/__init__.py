"""What a trainer leaves on disk: weights, checkpoints, exports."""
