"""What passes between the processes of a run: batches to the trainer, weights to the engines."""
