"""Checks before a run starts: processes and devices, memory, disk, software."""
