"""Functions that read the body of a request, and send JSON or server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from buckeye.chat.openai_api import error_body
from buckeye.errors import InferenceError

_MAX_BODY_BYTES = 64 * 2**20
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raise `HTTPException` 413 if the body is larger than 64 MiB."""
    body = bytearray()
    if int(request.headers.get("content-length", "0")) <= _MAX_BODY_BYTES:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                break
        else:
            return bytes(body)
    raise HTTPException(413, f"the body is larger than {_MAX_BODY_BYTES} bytes")


def json_response(content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(content), status_code, headers, "application/json")


def event_stream(events: AsyncGenerator[Any, None]) -> ASGIApp:
    """Return a response that sends `events` as server-sent events, and then `[DONE]`.

    If `events` raises `InferenceError`, the error is the last event before `[DONE]`. If the client
    disconnects, `events` raises `ClientDisconnect`.
    """

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            async with aclosing(events):
                async for event in events:
                    await _send_event(send, msgspec.json.encode(event))
        except ClientDisconnect:
            return
        except InferenceError as error:
            await _send_event(send, msgspec.json.encode(error_body(str(error), 500, code=error.code)))
        await _send_event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})

    return respond


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
