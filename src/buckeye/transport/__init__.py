"""Files that the processes of a run exchange: batches, weights and checkpoints."""
