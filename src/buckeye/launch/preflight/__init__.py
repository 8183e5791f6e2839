"""Checks before a run starts: devices, memory, disk, software, model and tasks."""
