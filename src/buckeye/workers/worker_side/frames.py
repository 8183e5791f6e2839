"""Messages between Buckeye and a worker: JSON objects, each preceded by its length (4 bytes, big-endian).

Buckeye sends `hello`, `load`, `tasks`, `rollout`, `score_group`, `isolation`, `asyncio_tasks`,
`cancel`, `ping` and `close`.
A worker replies to `hello` with `hello` and to `ping` with `pong`. `cancel` and `close` have no response. The
worker replies to every other message with one `result` or `error`, which repeats the `id` of the request.
Before the `result` of `tasks`, it sends any number of `page` messages.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

PROTOCOL = 1
"""Protocol version. Both sides must have the same version."""

MAX_FRAME = 64 * 1024 * 1024
"""Maximum bytes of one message."""

HEADER = struct.Struct(">I")
"""Format of the length before each message."""

Frame = dict[str, Any]


class FrameError(Exception):
    """Received data is not a message, or an object cannot be sent as one."""


def encode(frame: Frame) -> bytes:
    """Return a message with its length before it.

    Raises FrameError for values that JSON does not support (including NaN), and for too many bytes.
    """
    try:
        text = json.dumps(frame, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        try:
            body = text.encode()
        except UnicodeEncodeError:  # UTF-8 cannot encode half a surrogate pair; it becomes U+FFFD
            body = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from None
    if len(body) > MAX_FRAME:
        raise FrameError(f"the message has {len(body)} bytes; the limit is {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes, max_bytes: int = MAX_FRAME) -> int:
    """Return the length that a header announces. Raises FrameError if the length exceeds `max_bytes`."""
    (length,) = HEADER.unpack(header)
    if length > max_bytes:
        raise FrameError(f"the header announces {length} bytes; the limit is {max_bytes}")
    return int(length)


async def read_body(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME) -> bytes:
    """Return the body of the next message. Raises FrameError for more than `max_bytes`."""
    return await reader.readexactly(body_length(await reader.readexactly(HEADER.size), max_bytes))


def receive_body(connection: socket.socket, max_bytes: int = MAX_FRAME) -> bytes:
    """Return the body of the next message.

    Raises ConnectionError if the connection ends, and FrameError for more than `max_bytes`.
    """
    return _receive_exactly(connection, body_length(_receive_exactly(connection, HEADER.size), max_bytes))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = connection.recv(min(count - len(data), 1 << 20))
        if not chunk:
            raise ConnectionError("closed")
        data += chunk
    return bytes(data)


def decode(body: bytes) -> Frame:
    """Parse the body of a message. Raises FrameError."""
    try:
        frame = json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise FrameError("not an object with a type")
    return frame


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
