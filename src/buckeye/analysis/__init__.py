"""Compare, diagnose and replay runs, and export rollouts. Training does not need this package."""
