"""Files that the trainer writes: weights, checkpoints and exported models."""
