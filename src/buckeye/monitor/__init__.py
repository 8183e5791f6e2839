"""What a run records: logs, metrics, rollouts, and what figures say against it. Nothing is decided here."""
