"""Sampling from the policy: the embedded engine, its HTTP server, the client of inference servers, chat
rendering.

`client`, `render`, `types` and `protocol` do not import torch.
"""
