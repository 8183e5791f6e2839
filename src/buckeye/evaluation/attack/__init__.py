"""Search for replies that earn reward without the task: `buckeye env attack`."""
