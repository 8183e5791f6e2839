"""JSON-RPC messages as a proxy needs them: kind and id."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from buckeye.base.json_lines import fix_json
from buckeye.mcp.gateway.settings import GatewayError

HANDSHAKE_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Protocol revisions with an `initialize` handshake and sessions."""

UNSUPPORTED_VERSION, SERVER_ERROR = -32022, -32000

RequestId = int | str


class JsonRpcMessage(msgspec.Struct):
    """Envelope of a message. A response has no method, a notification has no id."""

    id: RequestId | None = None
    method: str | None = None

    @property
    def is_request(self) -> bool:
        return self.method is not None and self.id is not None

    @property
    def is_response(self) -> bool:
        return self.method is None and self.id is not None


_decode_frame = msgspec.json.Decoder(JsonRpcMessage).decode


def parse_message(body: bytes) -> JsonRpcMessage:
    """Return the message in a request's body. Raises GatewayError 400."""
    try:
        frame = _decode_frame(body)
    except (msgspec.DecodeError, RecursionError) as error:
        if body.lstrip()[:1] == b"[":
            raise GatewayError(
                400, "batch", "Batches are not supported: send one message per request"
            ) from None
        raise GatewayError(400, "json", f"The body is not a JSON-RPC message: {error}", code=-32700) from None
    if frame.method is None and frame.id is None:
        raise GatewayError(400, "json", "The body is not a JSON-RPC message: no `method` and no `id`")
    return frame


def read_line(line: bytes) -> tuple[JsonRpcMessage, bytes] | None:
    """Return the message in a line of an environment's output, and its text as strict JSON; None if none."""
    for text in (line, fix_json(line)):
        try:
            frame = _decode_frame(text)
        except (msgspec.DecodeError, RecursionError):
            continue
        return None if frame.method is None and frame.id is None else (frame, text)
    return None


def one_line(body: bytes) -> bytes:
    """Return the JSON without line breaks. In JSON, raw line breaks are only white space between tokens."""
    return body.replace(b"\r", b" ").replace(b"\n", b" ").strip()


def error_response(request_id: RequestId | None, code: int, message: str, data: dict[str, Any]) -> bytes:
    """Return a JSON-RPC error response."""
    error = {"code": code, "message": message, "data": data}
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}, ensure_ascii=False).encode()
