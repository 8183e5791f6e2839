"""JSON-RPC messages as far as a proxy must know them, kind and id, and their way to a response."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from buckeye.mcp.gateway.settings import Refusal

HANDSHAKE_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Protocol revisions with an `initialize` handshake and sessions."""

UNSUPPORTED_VERSION, SERVER_ERROR = -32022, -32000

RequestId = int | str


class Frame(msgspec.Struct):
    """The outside of a message. A response has no method, a notification no id."""

    id: RequestId | None = None
    method: str | None = None

    @property
    def is_request(self) -> bool:
        return self.method is not None and self.id is not None

    @property
    def is_response(self) -> bool:
        return self.method is None and self.id is not None


_decode_frame = msgspec.json.Decoder(Frame).decode


def read_frame(body: bytes) -> Frame:
    """The message in a request's body. Raises Refusal 400."""
    try:
        frame = _decode_frame(body)
    except (msgspec.DecodeError, RecursionError) as error:
        if body.lstrip()[:1] == b"[":
            raise Refusal(400, "batch", "Batches are not taken: send one message per request.") from None
        raise Refusal(400, "json", f"The body is no JSON-RPC message: {error}.", code=-32700) from None
    if frame.method is None and frame.id is None:
        raise Refusal(400, "json", "The body is no JSON-RPC message: it has neither a method nor an id.")
    return frame


def read_line(line: bytes) -> Frame | None:
    """The message in a line of an environment's output; None if it is none."""
    try:
        frame = _decode_frame(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if frame.method is None and frame.id is None else frame


def one_line(body: bytes) -> bytes:
    """The same JSON without line breaks: inside of strings they are escaped, outside they are space."""
    return body.replace(b"\r", b" ").replace(b"\n", b" ").strip()


def error_frame(request_id: RequestId | None, code: int, message: str, data: dict[str, Any]) -> bytes:
    """A JSON-RPC error response."""
    error = {"code": code, "message": message, "data": data}
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}, ensure_ascii=False).encode()
