"""What a run will need and whether it is there, before it is started: processes and devices, memory, disk,
software, and `rl doctor`, which looks at all of it."""
