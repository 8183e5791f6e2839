"""Parse the parts of a JSON-RPC message that the gateway needs: kind, id and progress token."""

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


class _Meta(msgspec.Struct):
    progress_token: RequestId | None = msgspec.field(name="progressToken", default=None)


class _Params(msgspec.Struct):
    meta: _Meta | None = msgspec.field(name="_meta", default=None)
    progress_token: RequestId | None = msgspec.field(name="progressToken", default=None)


class JsonRpcMessage(msgspec.Struct):
    """Parsed message. A response has no method, and a notification has no id."""

    id: RequestId | None = None
    method: str | None = None
    params: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def is_request(self) -> bool:
        return self.method is not None and self.id is not None

    @property
    def is_response(self) -> bool:
        return self.method is None and self.id is not None

    def progress_token(self) -> RequestId | None:
        """Return the progress token of a request or of a progress notification, or None."""
        try:
            params = msgspec.json.decode(self.params, type=_Params)
        except (ValueError, RecursionError):
            return None
        if self.is_request:
            return None if params.meta is None else params.meta.progress_token
        return params.progress_token if self.method == "notifications/progress" else None


_decode_frame = msgspec.json.Decoder(JsonRpcMessage).decode
_decode_batch = msgspec.json.Decoder(list[msgspec.Raw]).decode


def parse_message(body: bytes) -> JsonRpcMessage:
    """Return the message in the body of an HTTP request. Raises GatewayError 400 for an invalid body."""
    try:
        frame = _decode_frame(body)
    except (ValueError, RecursionError) as error:
        if body.lstrip()[:1] == b"[":
            raise GatewayError(
                400, "batch", "Batches are not supported: send one message per request"
            ) from None
        raise GatewayError(400, "json", f"The body is not a JSON-RPC message: {error}", code=-32700) from None
    if frame.method is None and frame.id is None:
        raise GatewayError(400, "json", "The body is not a JSON-RPC message: no `method` and no `id`")
    return frame


def read_line(line: bytes) -> list[tuple[JsonRpcMessage, bytes]]:
    """Return the messages in a line of an environment's output, each with its text as valid JSON.

    A batch (MCP 2025-03-26) contains several messages. Return [] for a line that is not a message.
    """
    for text in (line, fix_json(line)):
        try:
            is_batch = text.lstrip()[:1] == b"["
            texts = [bytes(item) for item in _decode_batch(text)] if is_batch else [text]
            messages = [(_decode_frame(item), item) for item in texts]
        except (ValueError, RecursionError):
            continue
        return [(frame, item) for frame, item in messages if frame.method is not None or frame.id is not None]
    return []


def one_line(body: bytes) -> bytes:
    """Return the JSON text on one line. Raw line breaks in JSON are only white space between tokens."""
    return body.replace(b"\r", b" ").replace(b"\n", b" ").strip()


def error_response(request_id: RequestId | None, code: int, message: str, data: dict[str, Any]) -> bytes:
    """Return a JSON-RPC error response."""
    error = {"code": code, "message": message, "data": data}
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}, ensure_ascii=False).encode()
