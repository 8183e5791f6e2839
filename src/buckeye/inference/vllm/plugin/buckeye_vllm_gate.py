"""Runs inside vLLM's API server: no route without the key.

vLLM's own check covers /v1 and /inference only; the routes that pause it and replace its weights are open to
whoever reaches the port. Given to vLLM as `--middleware buckeye_vllm_gate.Gate`.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

_OPEN = frozenset({"/health", "/ping"})
_REFUSAL = json.dumps(
    {"error": {"message": "The key is missing or wrong.", "type": "invalid_request_error", "code": 401}}
).encode()


class Gate:
    """ASGI middleware that asks every route but /health for the bearer key in `VLLM_API_KEY`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = (
            f"Bearer {os.environ['VLLM_API_KEY']}".encode() if "VLLM_API_KEY" in os.environ else None
        )

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[..., Awaitable[Any]],
        send: Callable[..., Awaitable[None]],
    ) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or scope["path"] in _OPEN or self._admitted(scope["headers"]):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_REFUSAL)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": _REFUSAL})

    def _admitted(self, headers: list[tuple[bytes, bytes]]) -> bool:
        if self._expected is None:
            return True
        given = next((value for name, value in headers if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
