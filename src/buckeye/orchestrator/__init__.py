"""Orchestrator: it runs rollouts of tasks, computes advantages per group, and writes batches for the trainer.

It computes no gradients and starts no inference server.
"""
