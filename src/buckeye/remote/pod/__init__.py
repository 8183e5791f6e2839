"""Programs for the other machine."""
