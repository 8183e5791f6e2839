"""What head and nodes say to each other."""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, kw_only=True, tag=True):
    """Base of all of them."""


# --- a node to its head ---


class Hello(Message):
    """The first word of a node: its name, the number that it wants (None: any), what it has, and the
    variables that tell gloo and NCCL which interface of it to use."""

    version: str
    name: str
    number: int | None
    cores: int
    gpus: tuple[int, ...]
    address: str
    variables: dict[str, str]


class Looked(Message):
    """Whether a node sees the file that it was asked for."""

    seen: bool


class ChosenPorts(Message):
    """Ports of a node that are held for the run."""

    ports: list[int]


class Started(Message):
    """A process has started."""

    id: int
    pid: int


class Printed(Message):
    """What a process has printed."""

    id: int
    data: bytes


class Beaten(Message):
    """Lines of a process's pipe of beats; `now` is the node's monotonic clock, in which they count."""

    id: int
    lines: bytes
    now: float


class Ended(Message):
    """A process has ended: its exit code, or the signal that ended it, negative. `problem` is why it could
    not even be started."""

    id: int
    code: int
    problem: str | None = None


class AskedToStop(Message):
    """Somebody wants the run to end in good order."""


# --- the head to a node ---


class Refused(Message):
    """A node cannot join. `final`: trying again is no use."""

    reason: str
    final: bool


class Welcome(Message):
    """A node has joined the run, under a number. It may be silent for at most `lost_timeout` seconds."""

    number: int
    output_dir: str
    lost_timeout: float


class Look(Message):
    """Is there a file with this content?"""

    path: str
    content: str


class ChoosePorts(Message):
    """Hold so many free ports."""

    count: int


class Start(Message):
    """Start a process of Buckeye: `words` are those after the interpreter's."""

    id: int
    title: str
    words: tuple[str, ...]
    env: dict[str, str]
    cwd: str


class Signal(Message):
    """Send a signal to a process: to all of its session, or to itself."""

    id: int
    number: int
    session: bool


class Leave(Message):
    """The run is over."""


# --- both ---


class Alive(Message):
    """Nothing but a sign of life."""


FromNode = Hello | Looked | ChosenPorts | Started | Printed | Beaten | Ended | AskedToStop | Alive
FromHead = Refused | Welcome | Look | ChoosePorts | Start | Signal | Leave | Alive

_encoder = msgspec.msgpack.Encoder()
_from_node: Any = msgspec.msgpack.Decoder(FromNode)
_from_head: Any = msgspec.msgpack.Decoder(FromHead)


def packed(message: Message) -> bytes:
    """As bytes."""
    return _encoder.encode(message)


def of_node(data: bytes) -> FromNode:
    """What a node has said. Raises msgspec.MsgspecError for anything else."""
    found: FromNode = _from_node.decode(data)
    return found


def of_head(data: bytes) -> FromHead:
    """What the head has said. Raises msgspec.MsgspecError for anything else."""
    found: FromHead = _from_head.decode(data)
    return found
