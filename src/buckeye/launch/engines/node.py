"""The part of an engine that runs on another node: it starts processes there and reports on them.

It reports their output, heartbeats and ends. The processes end with this one. Slurm's srun runs this file as
a program: `python -m buckeye.launch.engines.node` with `ask QUESTION` for one answer, or `carry` for one
process. Ray runs `Children` in an actor.
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
from buckeye.launch.hosts import HostFacts, LocalProcess
from buckeye.launch.preflight.devices import this_machine
from buckeye.launch.preflight.ports import Ports, address_towards, socket_variables
from buckeye.version import __version__

Event = tuple[Any, ...]
"""The number of a process, then its event: ("started", pid), ("printed", bytes), ("heard", bytes, time) or
("ended", code, problem)."""

_CHUNK = 65536
_CANNOT_START = 126
_END_SECONDS = 10.0
_LOOK_SECONDS = 10.0
_TURN_SECONDS = 0.1
_LENGTH = 4
_LONGEST = 2**24


# Requests that are answered at once.


def facts(towards: str) -> HostFacts:
    """Return the version and devices of this node, with its address towards the host `towards`."""
    address = address_towards(towards)
    machine = this_machine()
    visible = own_devices(os.environ)
    return HostFacts(
        name=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        version=__version__,
        python=sys.version.split()[0],
        cores=machine.cores,
        gpus=machine.gpus if visible is None else tuple(range(len(visible))),
        address=address,
        variables=socket_variables(address, os.environ),
    )


def own_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that the engine assigned, in CUDA's notation, or None if it assigned none."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else [word for word in given.split(",") if word]


def sees(path: Path, content: str) -> bool:
    """Return True if a file that was just written is visible here; network file systems may need a while."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            return path.read_text(encoding="utf-8") == content
        except OSError:
            if time.monotonic() > deadline or not path.parent.is_dir():
                return False
        time.sleep(_TURN_SECONDS)


def answer(question: Mapping[str, Any], ports: Ports) -> Any:
    """Answer `{"facts": HOST}`, `{"ports": COUNT}` or `{"sees": PATH, "content": TEXT}`, as JSON values."""
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
    """The processes of this node. Use it from the main thread only, because they end with their thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._events: list[Event] = []

    def start(self, number: int, words: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start Buckeye with the args `words` as process `number`."""
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
        """Call `call` whenever data arrives on `pipe`."""
        self._selector.register(pipe, selectors.EVENT_READ, call)

    def signal(self, number: int, which: int, session: bool) -> None:
        """Send a signal to a process or to its session, unless it has ended."""
        child = self._children.get(number)
        if child is not None:
            child.process.signal(which, session=session)

    def events(self, seconds: float) -> list[Event]:
        """Return the events so far, as soon as there is one, at the latest after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._events and time.monotonic() < deadline:
            for key, _ in self._selector.select(min(seconds, _TURN_SECONDS)):
                key.data()
            self._look()
        happened, self._events = self._events, []
        return happened

    @property
    def count(self) -> int:
        """Number of running processes."""
        return len(self._children)

    def kill_all(self) -> None:
        """Kill all processes and wait until they have ended."""
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
        """Return the data that has arrived; stop watching a pipe at its end."""
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
    """Return the variables of a process: those of this node, overridden by those of the run.

    The run numbers its devices from 0; they are replaced by the devices that the engine assigned.
    """
    given = {
        **child_environment(environ, runs_rollouts=False),
        "BUCKEYE_PARENT_PID": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        **env,
    }
    own, asked = own_devices(environ), own_devices(env)
    if own and asked:
        given["CUDA_VISIBLE_DEVICES"] = ",".join(own[int(device)] for device in asked)
    return given


def apply_event(process: RemoteProcess, event: Event) -> None:
    """Pass an event of a node on to its process."""
    known: dict[str, Callable[..., None]] = {
        "started": process.record_start,
        "printed": process.record_output,
        "heard": process.record_heartbeats,
        "ended": process.record_end,
    }
    known[event[1]](*event[2:])


class NodeActor:
    """The Ray actor on a node. Ray calls its methods one after the other, in the main thread."""

    def __init__(self) -> None:
        self._children, self._ports = Children(), Ports()

    def facts(self, towards: str) -> HostFacts:
        """Return the version and devices of the node."""
        return facts(towards)

    def choose_ports(self, count: int) -> list[int]:
        """Reserve `count` free ports of the node and return them."""
        return self._ports.choose(count)

    def sees(self, path: str, content: str) -> bool:
        """Return True if a file that was just written is visible on the node."""
        return sees(Path(path), content)

    def start(self, number: int, words: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start a process with the given number."""
        self._children.start(number, words, env, cwd)

    def signal(self, number: int, which: int, session: bool) -> None:
        """Send a signal to a process or to its session."""
        self._children.signal(number, which, session)

    def events(self, seconds: float) -> list[Event]:
        """Return the events so far, as soon as there is one, at the latest after `seconds`."""
        return self._children.events(seconds)


# The program that srun runs.


def frames(pipe: IO[bytes]) -> Iterator[Event]:
    """Yield the events that `carry` writes, until the pipe ends. Raises ValueError for other data."""
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
    """Start the process that the first line of stdin describes, and write its events to stdout.

    Each further line is a signal to send. The process is killed when stdin ends. Returns srun's exit code.
    """
    commands, out = sys.stdin.buffer, sys.stdout.buffer
    os.set_blocking(commands.fileno(), False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Commands arrive on stdin, so signals are dropped. SIG_IGN would be inherited by the child process.
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
    """Run `ask QUESTION`, with the question as JSON, or `carry`; return the exit code."""
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
