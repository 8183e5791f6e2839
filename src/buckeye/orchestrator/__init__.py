"""From tasks to batches: rollouts are played, graded, grouped and weighed.

No gradient is computed here, and no server is started.
"""
