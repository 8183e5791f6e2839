"""Runs that were started before: their state, stopping, cleaning, forking, exporting."""
