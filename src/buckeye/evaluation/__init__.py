"""What rewards and scores are worth. Nothing here is needed to train."""
