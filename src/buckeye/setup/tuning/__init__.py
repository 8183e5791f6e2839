"""`buckeye rl tune`: a learning rate and a warm-up, found by short forks of a run."""
