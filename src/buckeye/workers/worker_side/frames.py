"""Messages between Buckeye and a worker: JSON objects, each behind its length as four bytes, high byte first.

Buckeye asks: `hello`, `load`, `tasks`, `rollout`, `score_group`, `release`, `cancel`, `ping`, `close`. A
worker answers `hello` and `pong`, and every other question, named by its `id`, with one `result` or `error`;
`tasks` with any number of `page` before it. `cancel` and `release` have no answer of their own.
"""

from __future__ import annotations

import json
import struct
from typing import Any

PROTOCOL = 1
"""Of both sides; they must be equal."""

MAX_FRAME = 64 * 1024 * 1024
"""Most bytes of one message."""

HEADER = struct.Struct(">I")
"""The length in front of a message."""

Frame = dict[str, Any]


class FrameError(Exception):
    """What came is no message, or what should be sent cannot be one."""


def encode(frame: Frame, *, most: int = MAX_FRAME) -> bytes:
    """A message with its length in front. Raises FrameError for what JSON does not know (NaN among it), and
    for more than `most` bytes."""
    try:
        text = json.dumps(frame, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        try:
            body = text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, which UTF-8 cannot hold, becomes U+FFFD
            body = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from None
    if len(body) > most:
        raise FrameError(f"it has {len(body)} bytes, and {most} is the most")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """How many bytes follow a header. Raises FrameError if they are more than a message may have."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise FrameError(f"a message of {length} bytes is announced, and {MAX_FRAME} is the most")
    return int(length)


def decode(body: bytes) -> Frame:
    """The message of a body. Raises FrameError if it is none."""
    try:
        frame = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise FrameError("not an object with a type")
    return frame


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
