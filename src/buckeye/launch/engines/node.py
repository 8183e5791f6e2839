"""What an engine runs on another node: it starts processes there, and tells what they print, their
heartbeats, and when they end. They end with it.

Slurm's srun runs this file as a program, `python -m buckeye.launch.engines.node`, with `ask QUESTION` for
one answer, or `carry` for one process (see `main`). Ray has `Children` in an actor.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from buckeye.base.keys import child_environment
from buckeye.launch.engines.remote_process import RemoteProcess
from buckeye.launch.hosts import Facts, LocalProcess
from buckeye.launch.preflight.devices import this_machine
from buckeye.launch.preflight.ports import Ports, address_towards, socket_variables
from buckeye.version import __version__

Event = tuple[Any, ...]
"""("started", pid), ("printed", bytes), ("heard", bytes, time), ("ended", code, problem), after the number
of the process that it is of."""

_CHUNK = 65536
_CANNOT_START = 126
_END_SECONDS = 10.0
_LOOK_SECONDS = 10.0
_TURN_SECONDS = 0.1
_LENGTH = 4
_LONGEST = 2**24


# Questions, which are answered at once.


def facts(towards: str) -> Facts:
    """What this node has; its address is the one that reaches the host `towards`."""
    address = address_towards(towards)
    machine = this_machine()
    visible = own_devices(os.environ)
    return Facts(
        name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        version=__version__,
        python=sys.version.split()[0],
        cores=machine.cores,
        gpus=machine.gpus if visible is None else tuple(range(len(visible))),
        address=address,
        variables=socket_variables(address, os.environ),
    )


def own_devices(environ: Mapping[str, str]) -> list[str] | None:
    """The GPUs that the engine has given us, as CUDA calls them; None if it says nothing about them."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else [word for word in given.split(",") if word]


def sees(path: Path, content: str) -> bool:
    """Whether a file that was just written is here, too; network file systems may take a while."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            return path.read_text(encoding="utf-8") == content
        except OSError:
            if time.monotonic() > deadline or not path.parent.is_dir():
                return False
        time.sleep(_TURN_SECONDS)


def answer(question: Mapping[str, Any], ports: Ports) -> Any:
    """The answer to `{"facts": HOST}`, `{"ports": COUNT}` or `{"sees": PATH, "content": TEXT}`, as JSON."""
    if "facts" in question:
        return msgspec.to_builtins(facts(question["facts"]))
    if "ports" in question:
        return ports.choose(question["ports"])
    return sees(Path(question["sees"]), question["content"])


# Processes.


@dataclass(slots=True)
class _Child:
    process: LocalProcess
    output: int
    rest: bytes = b""


class Children:
    """Processes of this node. To be used from the main thread only, as they end with it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._events: list[Event] = []

    def start(self, number: int, words: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start Buckeye with `words` as the process `number`."""
        output, writing = os.pipe()
        try:
            process = LocalProcess(
                [sys.executable, *words],
                env=process_environment(os.environ, env),
                output=writing,
                cwd=Path(cwd) if Path(cwd).is_dir() else None,
            )
        except OSError as error:
            os.close(output)
            self._events.append((number, "ended", _CANNOT_START, str(error)))
            return
        finally:
            os.close(writing)
        child = self._children[number] = _Child(process, output)
        for pipe, take in ((output, self._printed), (process.heartbeats, self._heard)):
            os.set_blocking(pipe, False)
            self.watch(pipe, _call(take, number, child))
        self._events.append((number, "started", process.pid))

    def watch(self, pipe: int | IO[bytes], call: Callable[[], object]) -> None:
        """Have `call` called when something has come through `pipe`."""
        self._selector.register(pipe, selectors.EVENT_READ, call)

    def signal(self, number: int, which: int, session: bool) -> None:
        """Send a signal to a process, or to its session; none to one that has ended."""
        child = self._children.get(number)
        if child is not None:
            child.process.signal(which, session=session)

    def events(self, seconds: float) -> list[Event]:
        """What has happened, as soon as something has, at the latest after so many seconds."""
        deadline = time.monotonic() + seconds
        while not self._events and time.monotonic() < deadline:
            for key, _ in self._selector.select(min(seconds, _TURN_SECONDS)):
                key.data()
            self._look()
        happened, self._events = self._events, []
        return happened

    @property
    def count(self) -> int:
        """How many run."""
        return len(self._children)

    def kill_all(self) -> None:
        """End them without asking, and wait until they have."""
        for child in self._children.values():
            child.process.signal(signal.SIGKILL, session=True)
        deadline = time.monotonic() + _END_SECONDS
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.1, deadline - time.monotonic()))
        self._children.clear()

    def _look(self) -> None:
        for number, child in list(self._children.items()):
            if child.process.returncode is None:
                continue
            for take, pipe in ((self._printed, child.output), (self._heard, child.process.heartbeats)):
                while pipe in self._selector.get_map() and take(number, child):
                    pass
                self._forget(pipe)
                os.close(pipe)
            del self._children[number]
            self._events.append((number, "ended", child.process.returncode, None))

    def _printed(self, number: int, child: _Child) -> bool:
        data = self._read(child.output)
        if data:
            self._events.append((number, "printed", data))
        return bool(data)

    def _heard(self, number: int, child: _Child) -> bool:
        data = self._read(child.process.heartbeats)
        lines, end, child.rest = (child.rest + data).rpartition(b"\n")
        if end:
            self._events.append((number, "heard", lines + end, time.monotonic()))
        return bool(data)

    def _read(self, pipe: int) -> bytes:
        """What has come; a pipe that nobody will write to any more is not watched."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return b""
        if not data:
            self._forget(pipe)
        return data

    def _forget(self, pipe: int) -> None:
        with suppress(KeyError):
            self._selector.unregister(pipe)


def _call(take: Callable[[int, _Child], bool], number: int, child: _Child) -> Callable[[], bool]:
    return lambda: take(number, child)


def process_environment(environ: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process: those of this node and, before them, those that the run says. The devices
    that the run counts from 0 on are those that the engine has given us."""
    given = {
        **child_environment(environ, plays=False),
        "BUCKEYE_PARENT_PID": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        **env,
    }
    own, asked = own_devices(environ), own_devices(env)
    if own and asked:
        given["CUDA_VISIBLE_DEVICES"] = ",".join(own[int(device)] for device in asked)
    return given


def tell(process: RemoteProcess, event: Event) -> None:
    """Let a process of the run know what its node says of it."""
    known: dict[str, Callable[..., None]] = {
        "started": process.started,
        "printed": process.printed,
        "heard": process.heard,
        "ended": process.ended,
    }
    known[event[1]](*event[2:])


class NodeActor:
    """What Ray runs on a node; it calls its methods one after the other, in the main thread."""

    def __init__(self) -> None:
        self._children, self._ports = Children(), Ports()

    def facts(self, towards: str) -> Facts:
        """What the node has."""
        return facts(towards)

    def choose_ports(self, count: int) -> list[int]:
        """Hold so many free ports of it."""
        return self._ports.choose(count)

    def sees(self, path: str, content: str) -> bool:
        """See `sees`."""
        return sees(Path(path), content)

    def start(self, number: int, words: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start a process that is called `number`."""
        self._children.start(number, words, env, cwd)

    def signal(self, number: int, which: int, session: bool) -> None:
        """Send a signal to it."""
        self._children.signal(number, which, session)

    def events(self, seconds: float) -> list[Event]:
        """See `Children.events`."""
        return self._children.events(seconds)


# The program that srun runs.


def frames(pipe: IO[bytes]) -> Iterator[Event]:
    """The events that `carry` writes, until the pipe ends. Raises ValueError for what it has not written."""
    while len(head := pipe.read(_LENGTH)) == _LENGTH:
        length = int.from_bytes(head, "big")
        if length > _LONGEST:
            raise ValueError(f"a message of {length} bytes")
        data = pipe.read(length)
        if len(data) < length:
            return
        try:
            yield msgspec.msgpack.decode(data, type=tuple)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None


def carry() -> int:
    """Start the process that the first line of stdin describes, and write its events to stdout; obey the
    lines that follow, each a signal. It is killed when stdin ends. Returns the exit code for srun."""
    commands, out = sys.stdin.buffer, sys.stdout.buffer
    os.set_blocking(commands.fileno(), False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Who starts us says by stdin what is to be done. What is ignored would be so in what we start, too.
        signal.signal(number, lambda *_: None)
    children = Children()
    rest = b""
    lost = False

    def obey() -> None:
        nonlocal rest, lost
        data = os.read(commands.fileno(), _CHUNK)
        lost = not data
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "start" in said:
                children.start(0, said["start"], said["env"], said["cwd"])
            else:
                children.signal(0, said["signal"], said["session"])

    children.watch(commands, obey)
    try:
        while not lost:
            for event in children.events(_TURN_SECONDS):
                data = msgspec.msgpack.encode(event)
                out.write(len(data).to_bytes(_LENGTH, "big") + data)
                out.flush()
                if event[1] == "ended":
                    return 0
    except BrokenPipeError:
        pass
    finally:
        children.kill_all()
    return 1


def main(words: Sequence[str]) -> int:
    """`ask QUESTION`, which is JSON, or `carry`."""
    if words[0] == "carry":
        return carry()
    ports = Ports()
    try:
        sys.stdout.write(json.dumps(answer(json.loads(words[1]), ports)) + "\n")
    finally:
        ports.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
