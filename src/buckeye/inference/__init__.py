"""Sampling from the policy.

Contains the embedded engine, its HTTP server, the client of inference servers, and chat rendering. `client`,
`render`, `types` and `protocol` do not import torch.
"""
