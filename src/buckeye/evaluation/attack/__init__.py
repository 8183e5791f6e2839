"""Search for replies that are rewarded without the task: `buckeye env attack`."""
