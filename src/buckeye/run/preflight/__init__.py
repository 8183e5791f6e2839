"""What is looked at before a run: by `rl doctor` thoroughly, by `rl` itself as far as it takes no time."""
