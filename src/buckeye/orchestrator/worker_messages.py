"""Messages between the orchestrator and a process that runs its rollouts: MessagePack after a length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from buckeye.base.storage import utf8
from buckeye.envs.base import Task
from buckeye.envs.outcome_validation import error_outcome
from buckeye.inference.client.follower import ClientUse, ServerState
from buckeye.orchestrator.rollout import Rollout
from buckeye.workers.worker_side.frames import HEADER, MAX_FRAME

STREAM_LIMIT = 1 << 20
"""Bytes of received messages that wait in memory, per connection."""

_LARGEST_INTEGER = 1 << 63


class Setup(msgspec.Struct, tag=True, frozen=True):
    """First message to worker `index` of `count`: its settings as JSON, and the seed of its rollouts."""

    config: str
    seed: int
    index: int
    count: int


class Servers(msgspec.Struct, tag=True, frozen=True):
    """Current version of the policy, states of the servers, and the number of clients that share them."""

    version: int
    states: list[ServerState]
    clients: int


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start of group `index`, whose task has the id `task`, under a number.

    Before, `losses` workers have ended while they ran the group.
    """

    number: int
    index: int
    task: str
    size: int
    losses: int


class Cut(msgspec.Struct, tag=True, frozen=True):
    """Request to end the sampling of a group."""

    number: int


class Begun(msgspec.Struct, tag=True, frozen=True):
    """Start of the first rollout of a group, with this version of the policy."""

    number: int
    version: int


class Finished(msgspec.Struct, tag=True, frozen=True):
    """Rollout of a group. All rollouts of a group are sent when the last one has ended."""

    number: int
    rollout: Rollout


class ServerLost(msgspec.Struct, tag=True, frozen=True):
    """Loss of a server, whose epoch was the one of the last message `Servers`."""

    server: int
    epoch: int
    reason: str


class Pulse(msgspec.Struct, tag=True, frozen=True):
    """State of a worker, several times a second: counts of its client, and the delays of its event loop."""

    use: ClientUse
    late: list[float]
    held_up: float


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Error that ends the worker, and the run. `final` means that a restart cannot fix it."""

    message: str
    code: str
    hint: str | None
    final: bool


def _encode_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).data
    if isinstance(value, np.generic):
        return value.item()
    return dict(value) if isinstance(value, Mapping) else str(value)


def _decode_column(kind: Any, data: bytes) -> Any:
    return np.frombuffer(data, kind.__args__[1].__args__[0])


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_value)
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Setup | Servers | Start | Cut | Begun | Finished | ServerLost | Pulse | Failed, dec_hook=_decode_column
)


def encode(message: msgspec.Struct) -> bytes:
    """Return a message with its length before it.

    Message content that MessagePack cannot represent becomes text. A rollout that exceeds the maximum length,
    or is nested too deeply, is replaced by one with an error.
    """
    error, body = "", b""
    try:
        body = _encode_body(message)
    except RecursionError:
        error = "the messages of the rollout are nested too deeply to be sent between two processes"
    if len(body) > MAX_FRAME:
        error = f"the rollout has {len(body)} bytes; the limit between two processes is {MAX_FRAME}"
    if error:
        assert isinstance(message, Finished)
        short = replace(
            message.rollout,
            outcome=error_outcome("step", error),
            segments=(),
            replies=(),
            messages=(),
            earlier_attempts=(),
        )
        return encode(Finished(message.number, short))
    return HEADER.pack(len(body)) + body


def _encode_body(message: msgspec.Struct) -> bytes:
    try:
        return _ENCODER.encode(message)
    except (UnicodeEncodeError, OverflowError, TypeError):
        values = msgspec.to_builtins(message, builtin_types=(memoryview,), enc_hook=_encode_value)
        return _ENCODER.encode(_representable(values))


def to_send(rollout: Rollout) -> Rollout:
    """Return a rollout with text as keys of its messages. The receiver adds the task with `with_task`."""
    messages = tuple({str(name): value for name, value in m.items()} for m in rollout.messages)
    earlier = tuple(map(to_send, rollout.earlier_attempts))
    return replace(rollout, task=Task(id="", messages=()), messages=messages, earlier_attempts=earlier)


def with_task(rollout: Rollout, task: Task) -> Rollout:
    """Return a rollout whose attempts have this task."""
    earlier = tuple(replace(attempt, task=task) for attempt in rollout.earlier_attempts)
    return replace(rollout, task=task, earlier_attempts=earlier)


def decode(body: bytes) -> Any:
    """Return the message of a body. Raise `ValueError` if it is not a message."""
    return _DECODER.decode(body)


def _representable(value: Any) -> Any:
    """Return a value with valid text in place of half surrogate pairs and of integers above 64 bits."""
    if isinstance(value, dict):
        return {_representable(name): _representable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_representable(item) for item in value]
    if isinstance(value, int) and not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        return str(value)
    return utf8(value).decode() if isinstance(value, str) else value
