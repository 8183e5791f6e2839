"""Checks of `buckeye env check`, on the tasks and rewards of an environment."""
