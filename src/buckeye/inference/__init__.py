"""Sampling from the policy: the embedded engine, its HTTP server, the client of any such server, chat
rendering.

`client`, `render`, `types` and `protocol` import no torch.
"""
