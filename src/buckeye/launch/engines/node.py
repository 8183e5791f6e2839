"""Agent on another node of a Slurm or Ray cluster. It starts processes there and sends their events.

Slurm's srun runs this file as a program. `python -m buckeye.launch.engines.node query LIST` prints the result
of one method of `Node`, where LIST is the JSON list `[METHOD, ARGUMENT...]`. `python -m
buckeye.launch.engines.node run` runs one process. Ray runs `Node` as an actor. The processes end when the
program or the actor ends.
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
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from buckeye.base.keys import child_environment
from buckeye.launch.hosts import LocalProcess
from buckeye.launch.preflight.devices import this_machine
from buckeye.launch.preflight.ports import Ports, address_towards, socket_variables
from buckeye.launch.remote_process import RemoteProcess
from buckeye.version import __version__

Event = tuple[Any, ...]
"""Number of a process, and one event of this process.

The events are ("started", pid), ("output", bytes), ("heartbeats", bytes, time) and ("ended", code, problem).
"""

_CHUNK_BYTES = 65536
_CANNOT_START = 126
_END_SECONDS = 10.0
_VISIBILITY_SECONDS = 10.0
_POLL_SECONDS = 0.1
_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 2**24


@dataclass(slots=True)
class _Child:
    process: LocalProcess
    output: int
    rest: bytes = b""  # start of a heartbeat line whose end has not arrived


class Children:
    """The processes that this program or actor started on this node.

    Call `start` in the main thread only. On Linux, the started processes ask the kernel to kill them when
    the thread that started them ends (PR_SET_PDEATHSIG).
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._events: list[Event] = []

    def start(self, number: int, args: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start Python with `args` as process `number`."""
        output, write_end = os.pipe()
        try:
            process = LocalProcess(
                [sys.executable, *args],
                env=process_environment(os.environ, env),
                output=write_end,
                cwd=Path(cwd) if Path(cwd).is_dir() else None,
            )
        except OSError as error:
            os.close(output)
            self._events.append((number, "ended", _CANNOT_START, str(error)))
            return
        finally:
            os.close(write_end)
        child = self._children[number] = _Child(process, output)
        for pipe, receive in ((output, self._receive_output), (process.heartbeats, self._receive_heartbeats)):
            os.set_blocking(pipe, False)
            self.watch(pipe, partial(receive, number, child))
        self._events.append((number, "started", process.pid))

    def watch(self, pipe: int | IO[bytes], callback: Callable[[], object]) -> None:
        """Call `callback` whenever data arrives on `pipe`."""
        self._selector.register(pipe, selectors.EVENT_READ, callback)

    def signal(self, number: int, which: int, session: bool) -> None:
        """Send the signal `which` to a process, or to its session, unless the process has ended."""
        child = self._children.get(number)
        if child is not None:
            child.process.signal(which, session=session)

    def events(self, seconds: float) -> list[Event]:
        """Return the new events. Wait at most `seconds` for the first one."""
        deadline = time.monotonic() + seconds
        while not self._events and time.monotonic() < deadline:
            for key, _ in self._selector.select(min(seconds, _POLL_SECONDS)):
                key.data()
            self._collect_ended()
        events, self._events = self._events, []
        return events

    def kill_all(self) -> None:
        """Kill all processes and wait until they have ended."""
        for child in self._children.values():
            child.process.signal(signal.SIGKILL, session=True)
        deadline = time.monotonic() + _END_SECONDS
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.1, deadline - time.monotonic()))
        self._children.clear()

    def _collect_ended(self) -> None:
        for number, child in list(self._children.items()):
            if child.process.returncode is None:
                continue
            for receive, pipe in (
                (self._receive_output, child.output),
                (self._receive_heartbeats, child.process.heartbeats),
            ):
                while pipe in self._selector.get_map() and receive(number, child):
                    pass
                self._unwatch(pipe)
                os.close(pipe)
            del self._children[number]
            self._events.append((number, "ended", child.process.returncode, None))

    def _receive_output(self, number: int, child: _Child) -> bool:
        data = self._read(child.output)
        if data:
            self._events.append((number, "output", data))
        return bool(data)

    def _receive_heartbeats(self, number: int, child: _Child) -> bool:
        data = self._read(child.process.heartbeats)
        lines, end, child.rest = (child.rest + data).rpartition(b"\n")
        if end:
            self._events.append((number, "heartbeats", lines + end, time.monotonic()))
        return bool(data)

    def _read(self, pipe: int) -> bytes:
        """Return the data that has arrived; stop watching a pipe at its end."""
        try:
            data = os.read(pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self._unwatch(pipe)
        return data

    def _unwatch(self, pipe: int) -> None:
        with suppress(KeyError):
            self._selector.unregister(pipe)


def process_environment(environ: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a process: `environ` of this node, overridden by `env` of the run.

    In CUDA_VISIBLE_DEVICES, the run counts devices from 0. Each number is replaced by the device with that
    index among the devices that the engine assigned.
    """
    variables = {
        **child_environment(environ, runs_rollouts=False),
        "BUCKEYE_PARENT_PID": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        **env,
    }
    assigned, requested = own_devices(environ), own_devices(env)
    if assigned and requested:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(assigned[int(device)] for device in requested)
    return variables


def apply_event(process: RemoteProcess, event: Event) -> None:
    """Record an event of a node in the handle of its process."""
    handlers: dict[str, Callable[..., None]] = {
        "started": process.record_start,
        "output": process.record_output,
        "heartbeats": process.record_heartbeats,
        "ended": process.record_end,
    }
    handlers[event[1]](*event[2:])


class Node(Children):
    """Processes of a node, and methods that the launcher calls on the node.

    Ray runs this class as an actor, and calls its methods one after the other in the main thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ports = Ports()

    def facts(self, towards: str) -> dict[str, Any]:
        """Return the fields of `HostFacts`.

        The host `towards` can connect to this node at the returned `address`.
        """
        address = address_towards(towards)
        machine = this_machine()
        visible = own_devices(os.environ)
        return {
            "name": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "version": __version__,
            "python": sys.version.split()[0],
            "cores": machine.cores,
            "gpus": machine.gpus if visible is None else list(range(len(visible))),
            "address": address,
            "variables": socket_variables(address, os.environ),
        }

    def choose_ports(self, count: int) -> list[int]:
        """Reserve `count` free ports of this node and return them."""
        return self.ports.choose(count)

    def sees(self, path: str, content: str) -> bool:
        """Return True if the file at `path` has this content.

        Waits up to 10 s for the file: a network file system may show a new file late.
        """
        file, deadline = Path(path), time.monotonic() + _VISIBILITY_SECONDS
        while True:
            try:
                return file.read_text(encoding="utf-8") == content
            except OSError:
                if time.monotonic() > deadline or not file.parent.is_dir():
                    return False
            time.sleep(_POLL_SECONDS)


def own_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that the engine assigned, in CUDA's notation, or None if it assigned none."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [device for device in visible.split(",") if device]


def frames(pipe: IO[bytes]) -> Iterator[Event]:
    """Yield the events that `run` writes, until the pipe ends. Raises ValueError for invalid data."""
    while len(head := pipe.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
        length = int.from_bytes(head, "big")
        if length > _MAX_FRAME_BYTES:
            raise ValueError(f"invalid output: a frame of {length} bytes")
        data = pipe.read(length)
        if len(data) < length:
            return
        try:
            yield msgspec.msgpack.decode(data, type=tuple)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None


def run() -> int:
    """Start the process that the first line of stdin describes, and write its events to stdout.

    Each further line names a signal to send to the process. When stdin ends, kill the process. Returns the
    exit code of this program.
    """
    commands, out = sys.stdin.buffer, sys.stdout.buffer
    os.set_blocking(commands.fileno(), False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # The launcher sends commands on stdin, so this program drops signals. A handler drops them, because
        # the child process would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    children = Children()
    rest = b""
    is_lost = False

    def execute_commands() -> None:
        nonlocal rest, is_lost
        data = os.read(commands.fileno(), _CHUNK_BYTES)
        is_lost = not data
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if "start" in command:
                children.start(0, command["start"], command["env"], command["cwd"])
            else:
                children.signal(0, command["signal"], command["session"])

    children.watch(commands, execute_commands)
    try:
        while not is_lost:
            for event in children.events(_POLL_SECONDS):
                data = msgspec.msgpack.encode(event)
                out.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
                out.flush()
                if event[1] == "ended":
                    return 0
    except BrokenPipeError:
        pass
    finally:
        children.kill_all()
    return 1


def main(args: Sequence[str]) -> int:
    """Run the subcommand `run` or `query LIST`, and return the exit code.

    LIST is the JSON list `[METHOD, ARGUMENT...]`.
    """
    if args[0] == "run":
        return run()
    method, *values = json.loads(args[1])
    node = Node()
    with closing(node.ports):
        sys.stdout.write(json.dumps(getattr(node, method)(*values)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
