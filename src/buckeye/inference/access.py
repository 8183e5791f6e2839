"""Access to the inference server: its key, and the routes that are open without a key."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from buckeye.base.keys import generated_key, generated_key_file
from buckeye.base.request_gate import AccessRules, is_loopback
from buckeye.config.inference import InferenceConfig
from buckeye.errors import UsageError

PUBLIC_ROUTES = (
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
"""Routes that a server without a key serves. None of them changes the server."""


def client_line(config: InferenceConfig, rules: AccessRules) -> str:
    """Return a shell line that sets the URL and key for OpenAI clients. The line does not show the key."""
    variable, port = config.server.api_key_var, config.server.port
    if rules.key is None:
        key = "none"
    elif os.environ.get(variable):
        key = f'"${variable}"'
    else:
        key = f'"$(cat {shlex.quote(str(generated_key_file(variable, port)))})"'
    return f"export OPENAI_BASE_URL={local_url(rules.host, port)}/v1 OPENAI_API_KEY={key}"


def local_url(host: str, port: int) -> str:
    """Return the URL of a server that listens on `host`, for clients on this machine."""
    if host in ("0.0.0.0", "::"):  # noqa: S104, compared only
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def short_model_name(model: str) -> str:
    """Return the last part of an absolute path, or a hub name unchanged. Requests may use this name."""
    return Path(model).name if Path(model).is_absolute() else model


@contextlib.contextmanager
def access_rules(config: InferenceConfig) -> Iterator[AccessRules]:
    """Yield the access rules of the server.

    The key comes from the environment variable `inference.server.api_key_var`. If the variable is not set, a
    new key is generated and stored in a file that local clients read. With `no_key` the server has no key.

    Raise `UsageError` if the address is reachable from other machines and the variable is not set, or if the
    variable is set together with `no_key`.
    """
    server = config.server
    host = server.host or "127.0.0.1"
    key = os.environ.get(server.api_key_var) or None
    if key is None and not is_loopback(host):
        raise UsageError(
            f"inference.server.host = {host} is reachable from other machines, so a key is required",
            code="BK-KEY-MISSING",
            hint=f"set the environment variable {server.api_key_var} (inference.server.api_key_var)",
        )
    if key is not None and config.no_key:
        raise UsageError(
            f"inference.no_key is true, but {server.api_key_var} has a key",
            code="BK-CONFIG-CONFLICT",
            hint=f"unset {server.api_key_var}, or remove inference.no_key",
        )
    with contextlib.ExitStack() as stack:
        if key is None and not config.no_key:
            key = stack.enter_context(generated_key(server.api_key_var, server.port))
        yield AccessRules(
            host=host,
            key=key,
            hosts=tuple(server.allowed_hosts),
            origins=tuple(server.allowed_origins),
            public=PUBLIC_ROUTES,
            key_hint=f"send `Authorization: Bearer <key>` with the key in {server.api_key_var} of the server",
        )
