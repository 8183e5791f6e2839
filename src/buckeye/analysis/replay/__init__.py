"""Replay: recompute one step or all steps of a run and compare them with the records."""
