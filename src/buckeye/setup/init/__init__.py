"""`buckeye rl init`: the configuration of an environment, written from what its server says of itself."""
