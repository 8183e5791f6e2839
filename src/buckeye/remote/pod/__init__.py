"""Programs that run on the other machine: they run a job, supervise it, and answer requests about it."""
