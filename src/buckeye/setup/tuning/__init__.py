"""`buckeye rl tune`: find a learning rate with short forks of a run."""
