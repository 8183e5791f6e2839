"""`buckeye node`: one more host for a run. It does what the head says, and ends all that it has started as
soon as it loses it."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from buckeye.base.keys import child_environment
from buckeye.base.process import INTERRUPTED, StopFlag
from buckeye.cluster import messages as say
from buckeye.cluster.address import socket_variables
from buckeye.cluster.channel import Channel, LostNodeError, derived_key, greet
from buckeye.cluster.children import Children
from buckeye.errors import RunError

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 1.0
_GREETED_SECONDS = 60.0  # until the head has said how long one may be silent
_TURN_SECONDS = 0.1
_ALIVE_SECONDS = 1.0
_LOOK_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the head is, and who we are. `key()` is read again for every connection: the head may be another
    one then. `address` is ours; None is that which reaches the head."""

    host: str
    port: int
    key: Callable[[], str]
    name: str
    number: int | None
    address: str | None
    patience: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What this host has: `version` is of Buckeye."""

    version: str
    cores: int
    gpus: Sequence[int]
    choose_ports: Callable[[int], list[int]]


def run_agent(place: Place, host: Host) -> int:
    """Serve a run until it is over; the exit code. Raises RunError if its head does not answer, or not any
    more, for `place.patience` seconds, or does not want this node."""
    stop = StopFlag().install()
    deadline = time.monotonic() + place.patience
    told = ""
    while not stop.requested:
        try:
            joined = _join(place, host)
        except LostNodeError as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"No run at {place.host}:{place.port} took this node within {place.patience:.0f} s: "
                    f"{error}."
                ) from None
            if str(error) != told:
                log.info("Waiting for the run at %s:%d: %s", place.host, place.port, error)
            told = str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        told = ""
        if _Service(joined, host, stop).until_end():
            return 0
        deadline = time.monotonic() + place.patience
    return INTERRUPTED


@dataclass(frozen=True, kw_only=True, slots=True)
class _Joined:
    """A run that has taken this node. `waiting` are messages that have come already."""

    channel: Channel
    welcome: say.Welcome
    key: str
    waiting: list[say.FromHead] = field(default_factory=list)


def _join(place: Place, host: Host) -> _Joined:
    try:
        key = place.key()
    except FileNotFoundError as error:
        raise LostNodeError(f"{error.filename}, the nodes' key, is not there") from None
    try:
        connection = socket.create_connection((place.host, place.port), timeout=_CONNECT_SECONDS)
    except OSError as error:
        raise LostNodeError(error.strerror or str(error)) from None
    address = place.address or connection.getsockname()[0]
    channel = greet(connection, key, timeout=_GREETED_SECONDS)
    try:
        hello = say.Hello(
            version=host.version,
            name=place.name,
            number=place.number,
            cores=host.cores,
            gpus=tuple(host.gpus),
            address=address,
            variables=socket_variables(address, os.environ),
        )
        channel.send(say.packed(hello))
        first: list[say.FromHead] = []
        while not first:
            first = [say.of_head(data) for data in channel.receive()]
        answer = first.pop(0)
        if isinstance(answer, say.Refused):
            raise (RunError if answer.final else LostNodeError)(answer.reason)
        if not isinstance(answer, say.Welcome):
            raise LostNodeError("it did not say whether it takes this node")
    except BaseException:
        channel.close()
        raise
    channel.set_timeout(answer.lost_timeout)
    log.info("Joined the run in %s as node %d (%s)", answer.output_dir, answer.number, place.name)
    return _Joined(channel=channel, welcome=answer, key=key, waiting=first)


class _Service:
    """What is done for one run, while the connection lasts."""

    def __init__(self, joined: _Joined, host: Host, stop: StopFlag) -> None:
        self._channel, self._host, self._stop = joined.channel, host, stop
        self._silence = joined.welcome.lost_timeout
        self._waiting = joined.waiting
        self._env = _environment(os.environ, joined.key)
        self._heard = self._said = time.monotonic()
        self._asked = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._children = Children(self._selector, self._tell)

    def until_end(self) -> bool:
        """True when the run is over, False when the connection is lost. Nothing that was started is left."""
        try:
            return self._serve()
        except (LostNodeError, msgspec.MsgspecError) as error:
            log.warning("The run is lost: %s. Ending %d processes", error, self._children.count)
            return False
        finally:
            self._children.kill_all()
            self._channel.close()
            self._selector.close()

    def _serve(self) -> bool:
        while True:
            for message in self._waiting:
                if isinstance(message, say.Leave):
                    log.info("The run is over")
                    return True
                self._obey(message)
            self._waiting = []
            for key, _ in self._selector.select(_TURN_SECONDS):
                if key.fileobj is self._channel:
                    self._heard = time.monotonic()
                    self._waiting += [say.of_head(data) for data in self._channel.receive()]
                else:
                    key.data()
            self._children.look()
            self._look_at_time()

    def _look_at_time(self) -> None:
        now = time.monotonic()
        if now - self._heard > self._silence:
            raise LostNodeError(f"the head gave no sign of life for {self._silence:.0f} s")
        if now - self._said > _ALIVE_SECONDS:
            self._tell(say.Alive())
        if self._stop.requested:
            self._stop.requested = False
            if self._asked:
                raise LostNodeError("it was asked twice to end")
            self._asked = True
            log.info("The run is asked to end in good order (again to end this node at once)")
            self._tell(say.AskedToStop())

    def _tell(self, message: say.Message) -> None:
        self._said = time.monotonic()
        self._channel.send(say.packed(message))

    def _obey(self, message: say.FromHead) -> None:
        if isinstance(message, say.Start):
            env = {**self._env, **message.env}
            cwd = Path(message.cwd)
            argv = [sys.executable, *message.words]
            self._children.start(message.id, argv, env, cwd if cwd.is_dir() else None)
            log.info("Started %s", message.title)
        elif isinstance(message, say.Signal):
            self._children.signal(message.id, message.number, session=message.session)
        elif isinstance(message, say.ChoosePorts):
            self._tell(say.ChosenPorts(ports=self._host.choose_ports(message.count)))
        elif isinstance(message, say.Look):
            self._tell(say.Looked(seen=_sees(Path(message.path), message.content)))


def _environment(environ: Mapping[str, str], key: str) -> dict[str, str]:
    """What every process of this node gets beside what the head says."""
    own = {
        "BUCKEYE_INFERENCE_KEY": environ.get("BUCKEYE_INFERENCE_KEY") or derived_key(key, "inference"),
        "BUCKEYE_PARENT_PID": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    return {**child_environment(environ, plays=False), **own}


def _sees(path: Path, content: str) -> bool:
    """Whether a file that was just written is here, too; network file systems may take a while."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            return path.read_text(encoding="utf-8") == content
        except OSError:
            if time.monotonic() > deadline or not path.parent.is_dir():
                return False
        time.sleep(_TURN_SECONDS)
