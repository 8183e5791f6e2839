"""Who may use the inference server: its key, and what is open without one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from buckeye.base.keys import made_key
from buckeye.base.request_gate import Rules, is_loopback
from buckeye.config.inference import InferenceConfig
from buckeye.errors import UsageError

PUBLIC = (
    "/health",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
)
"""What a server without a key answers: nothing of it changes the server."""


@contextlib.contextmanager
def access_rules(config: InferenceConfig) -> Iterator[Rules]:
    """Whom the server answers, for as long as the block runs: those who know the key of the variable that
    the configuration names, or else one that is made for this start and put where clients of this machine
    find it.

    Raises UsageError for an address in reach of others without a key that was chosen.
    """
    server = config.server
    host = server.host or "127.0.0.1"
    key = os.environ.get(server.api_key_var) or None
    if key is None and not is_loopback(host):
        raise UsageError(
            f"inference.server.host = {host} is reachable from other machines, so a key is required: set the "
            f"environment variable {server.api_key_var} (inference.server.api_key_var)."
        )
    if key is not None and config.no_key:
        raise UsageError(
            f"inference.no_key is set, and so is a key, {server.api_key_var}: unset one of them."
        )
    with contextlib.ExitStack() as stack:
        if key is None and not config.no_key:
            key = stack.enter_context(made_key(server.api_key_var, server.port))
        yield Rules(
            host=host,
            key=key,
            hosts=tuple(server.allowed_hosts),
            origins=tuple(server.allowed_origins),
            public=PUBLIC,
            how_to_send=f"send `Authorization: Bearer <key>`, the key that {server.api_key_var} holds there",
        )
