"""ASGI application of the proxy: it finds the rollout, reads the request and returns the replies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from buckeye.chat.openai_api import decode_json
from buckeye.errors import UsageError
from buckeye.workers.proxy import anthropic, chat, completions, responses
from buckeye.workers.proxy.errors import Dialect, WireError
from buckeye.workers.proxy.exchange import Exchange
from buckeye.workers.proxy.rollout import ROLLOUT_ENDED, ProxyRollout

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
_MAX_CLOSED = 100_000  # number of closed rollouts whose late calls get status 410
_CLIENT_CLOSED = 499

Receive = Callable[[], Any]
Send = Callable[[Mapping[str, Any]], Any]

_MODELS = "v1/models"
_ROUTES: Mapping[str, tuple[Dialect, Callable[[ProxyRollout, Any], Exchange]]] = {
    "v1/chat/completions": ("openai", chat.read),
    "v1/completions": ("openai", completions.read),
    "v1/responses": ("openai", responses.read),
    "v1/messages": ("anthropic", anthropic.read),
    "inference/v1/generate": ("openai", completions.read_generate),
    "v1/inference/v1/generate": ("openai", completions.read_generate),
}


class WireApp:
    """ASGI application that answers the requests of all open rollouts."""

    def __init__(self) -> None:
        self._open: dict[str, ProxyRollout] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def open(self, rollout: ProxyRollout) -> None:
        """Start serving a rollout."""
        self._open[rollout.id] = rollout

    async def close(self, rollout: ProxyRollout) -> None:
        """Stop serving a rollout, and end its open calls."""
        del self._open[rollout.id]
        self._closed[rollout.id] = None
        if len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)
        await rollout.close()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        rollout_id, _, route = scope["path"].removeprefix("/rollouts/").partition("/")
        dialect: Dialect = _ROUTES[route][0] if route in _ROUTES else "openai"
        try:
            rollout = self._find(scope, rollout_id)
            status, content, kind = await self._answer(rollout, route, scope, receive)
        except WireError as error:
            status, kind = error.status, b"application/json"
            content = msgspec.json.encode(error.content(dialect))
        except Exception as error:
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            status, kind = 500, b"application/json"
            defect = WireError(500, f"The proxy failed: {type(error).__name__}. See Buckeye's log.")
            content = msgspec.json.encode(defect.content(dialect))
        await _send(send, status, content, kind)

    def _find(self, scope: Mapping[str, Any], rollout_id: str) -> ProxyRollout:
        if not scope["path"].startswith("/rollouts/"):
            raise WireError(404, "Unknown path: every path begins with /rollouts/ID/.")
        if rollout_id in self._closed:
            raise WireError(410, ROLLOUT_ENDED)
        rollout = self._open.get(rollout_id)
        if rollout is None:
            raise WireError(404, f"No open rollout has the id {rollout_id!r}.")
        headers = dict(scope["headers"])
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not rollout.accepts_key(given):
            raise WireError(401, "Wrong key for this rollout.")
        return rollout

    async def _answer(
        self, rollout: ProxyRollout, route: str, scope: Mapping[str, Any], receive: Receive
    ) -> tuple[int, bytes, bytes]:
        method = "GET" if route == _MODELS else "POST"
        if route != _MODELS and route not in _ROUTES:
            routes = ", ".join((_MODELS, *_ROUTES))
            raise WireError(404, f"Unknown route {route!r} below {_root(scope)}. The routes are {routes}.")
        if scope["method"] != method:
            raise WireError(405, f"{route} accepts only {method}.")
        if route == _MODELS:
            return 200, msgspec.json.encode(_model_list(rollout)), b"application/json"
        body = await _read_body(scope, receive)
        try:
            fields, trained = _pop_trained(decode_json(body))
            exchange = _ROUTES[route][1](rollout, fields)
        except UsageError as error:
            raise WireError(400, str(error)) from error
        call = exchange.call
        policy_call = rollout.start(replace(call, options=replace(call.options, trained=trained)))
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({policy_call, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect.cancel()
            if not policy_call.done():  # the client has disconnected
                policy_call.cancel()
                await asyncio.wait({policy_call})
        try:
            replies = policy_call.result()
        except asyncio.CancelledError:
            raise WireError(410, "This rollout has ended, or its client has disconnected.") from None
        if exchange.is_streaming:
            return 200, b"".join(exchange.to_events(replies)), b"text/event-stream; charset=utf-8"
        return 200, msgspec.json.encode(exchange.to_json(replies)), b"application/json"


def _pop_trained(fields: Any) -> tuple[Any, bool]:
    """Return a request without the field `trained`, and the value of this field (default: True).

    All routes accept the field. Raises `WireError` if its value is not a boolean.
    """
    if not isinstance(fields, dict) or "trained" not in fields:
        return fields, True
    trained = fields.pop("trained")
    if not isinstance(trained, bool):
        raise WireError(400, "`trained` must be true or false.", code="trained")
    return fields, trained


def _model_list(rollout: ProxyRollout) -> dict[str, Any]:
    model = {"id": rollout.model, "object": "model", "created": 0, "owned_by": "buckeye"}
    if rollout.seq_len is not None:
        model["max_model_len"] = rollout.seq_len
    return {"object": "list", "data": [model]}


def _root(scope: Mapping[str, Any]) -> str:
    return "/".join(scope["path"].split("/")[:3])


async def _read_body(scope: Mapping[str, Any], receive: Receive) -> bytes:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        raise WireError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise WireError(_CLIENT_CLOSED, "The client has disconnected.")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise WireError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
        if not message.get("more_body"):
            return bytes(body)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: int, content: bytes, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
    if status >= 400:
        headers.append((b"x-should-retry", b"false"))  # otherwise OpenAI and Anthropic clients retry
    with contextlib.suppress(ConnectionError):
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})
