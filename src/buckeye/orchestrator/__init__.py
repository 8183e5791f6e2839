"""Tasks to batches: runs rollouts, groups them, and computes rewards and advantages.

Computes no gradients and starts no inference server.
"""
