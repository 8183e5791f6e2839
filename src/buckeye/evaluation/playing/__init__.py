"""`buckeye env play`: one rollout at a time, played by a person, by chance, or by a model, and shown."""
