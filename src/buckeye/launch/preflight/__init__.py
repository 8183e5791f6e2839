"""What a run will need and whether it is there, before it is started: processes and devices, memory, disk,
software."""
