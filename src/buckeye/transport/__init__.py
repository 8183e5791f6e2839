"""Data between the processes of a run: batches for the trainer, weights for the engines, checkpoints."""
