"""Replay: recompute one step or all steps of a run, and compare the results with the recorded values."""
