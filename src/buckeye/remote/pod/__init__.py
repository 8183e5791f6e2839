"""What runs on the other machine. These modules need the standard library only: they are there first."""
