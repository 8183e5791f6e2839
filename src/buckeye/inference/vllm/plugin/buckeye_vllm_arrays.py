"""Middleware that sends sampled tokens as arrays, and completes prompts whose start was not sent.

vLLM writes JSON with several fields per token, whose decoding costs the client more than all else for a long
reply. Here, the server decodes it. Buckeye passes this middleware to vLLM as `--middleware
buckeye_vllm_arrays.Arrays`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import buckeye_vllm_imports
import msgspec

_types = buckeye_vllm_imports.load("types", room="inference")

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]

_ROUTE = "/inference/v1/generate"


class Arrays:
    """ASGI middleware for the requests for tokens of clients that accept arrays."""

    def __init__(self, app: Callable[[_Message, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app
        self._kept = _types.KeptPrompts()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Pass the request on, with its whole prompt, and convert the reply."""
        accepts = scope["type"] == "http" and scope["path"] == _ROUTE
        if not accepts or not _types.accepts_arrays(scope["headers"]):
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        try:
            fields = msgspec.json.decode(body)
            prompt, prefix = fields["token_ids"], fields.pop("prefix", None)
        except (KeyError, TypeError, AttributeError, msgspec.DecodeError):
            await self._app(scope, _sent_again(body, receive), send)  # vLLM reports the error
            return
        if prefix is not None:
            try:
                prompt = self._kept.prompt(msgspec.convert(prefix, _types.Prefix), prompt)
            except (TypeError, msgspec.ValidationError) as error:
                await _refuse(send, 400, f"invalid prefix: {error}")
                return
            if prompt is None:
                await _refuse(
                    send, 410, "the start of the prompt is not kept any more: send the whole prompt"
                )
                return
            body = msgspec.json.encode({**fields, "token_ids": prompt})
            length = (b"content-length", str(len(body)).encode())
            others = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
            scope = {**scope, "headers": [*others, length]}
        status, headers, reply = await self._call(scope, body, receive)
        try:
            arrays = _types.json_to_arrays(reply) if status == 200 else None
        except (ValueError, msgspec.DecodeError):
            arrays = None  # a stream, or a reply without log-probs
        if arrays is None:
            await _respond(send, status, reply, headers)
            return
        if len(arrays) == 1 and isinstance(fields.get("request_id"), str):
            self._kept.keep(fields["request_id"], prompt, arrays[0].token_ids)
        await _respond(send, 200, msgspec.msgpack.encode(arrays), content_type=_types.ARRAYS_TYPE)

    async def _call(
        self, scope: _Message, body: bytes, receive: _Receive
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return the status, the headers and the body of vLLM's reply."""
        sent: list[_Message] = []

        async def collect(message: _Message) -> None:
            sent.append(message)

        await self._app(scope, _sent_again(body, receive), collect)
        start, *parts = sent
        return start["status"], start["headers"], b"".join(part.get("body", b"") for part in parts)


async def _read_body(receive: _Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


def _sent_again(body: bytes, receive: _Receive) -> _Receive:
    """Return a function that receives a body that was read already, and then later messages."""
    bodies = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_body() -> _Message:
        message = next(bodies, None)
        return await receive() if message is None else message

    return receive_body


async def _refuse(send: _Send, status: int, message: str) -> None:
    await _respond(send, status, msgspec.json.encode({"error": {"message": message}}))


async def _respond(
    send: _Send,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    content_type: str = "application/json",
) -> None:
    if headers is None:
        headers = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
