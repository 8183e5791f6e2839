"""Compare, diagnose and replay runs; export rollouts. No run needs this to train."""
