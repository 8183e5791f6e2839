"""`buckeye rl tune`: a learning rate, found by short forks of a run."""
