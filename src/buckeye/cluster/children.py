"""The processes that a node has started for its head."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from buckeye.cluster import messages as say
from buckeye.cluster.session import ended, signal_session, start_session

_CHUNK = 65536
_CANNOT_START = 126
_END_SECONDS = 10.0


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    output: int
    beats: int
    rest: bytes = b""


class Children:
    """Starts processes, and tells what they print, how they beat and when they end. What they write is taken
    in when `selector` says so: the data of its keys is to be called."""

    def __init__(self, selector: selectors.BaseSelector, tell: Callable[[say.Message], None]) -> None:
        self._selector = selector
        self._tell = tell
        self._children: dict[int, _Child] = {}

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._children)

    def start(self, number: int, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> None:
        """Start a process that the head calls `number`."""
        output, writing = os.pipe()
        try:
            process, beats = start_session(argv, env=env, output=writing, cwd=cwd)
        except OSError as error:
            os.close(output)
            self._tell(say.Ended(id=number, code=_CANNOT_START, problem=str(error)))
            return
        finally:
            os.close(writing)
        child = self._children[number] = _Child(process, output, beats)
        for pipe, take in ((output, self._printed), (beats, self._beaten)):
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, _call(take, number, child))
        self._tell(say.Started(id=number, pid=process.pid))

    def signal(self, number: int, which: int, *, session: bool) -> None:
        """Send a signal to a process, or to its session; none to one that has ended."""
        child = self._children.get(number)
        if child is None or ended(child.process):
            return
        if session:
            signal_session(child.process.pid, which)
        else:
            with suppress(ProcessLookupError):
                child.process.send_signal(which)

    def look(self) -> None:
        """Tell of those that have ended."""
        for number, child in list(self._children.items()):
            if ended(child.process):
                for take, pipe in ((self._printed, child.output), (self._beaten, child.beats)):
                    while pipe in self._selector.get_map() and take(number, child):
                        pass
                    self._forget(pipe)
                    os.close(pipe)
                del self._children[number]
                self._tell(say.Ended(id=number, code=child.process.returncode))

    def kill_all(self) -> None:
        """End them without asking, and wait until they have."""
        for child in self._children.values():
            signal_session(child.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _END_SECONDS
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.1, deadline - time.monotonic()))
            for pipe in (child.output, child.beats):
                self._forget(pipe)
                os.close(pipe)
        self._children.clear()

    def _printed(self, number: int, child: _Child) -> bool:
        data = self._read(child.output)
        if data:
            self._tell(say.Printed(id=number, data=data))
        return bool(data)

    def _beaten(self, number: int, child: _Child) -> bool:
        data = self._read(child.beats)
        lines, end, child.rest = (child.rest + data).rpartition(b"\n")
        if end:
            self._tell(say.Beaten(id=number, lines=lines + end, now=time.monotonic()))
        return bool(data)

    def _read(self, pipe: int) -> bytes:
        """What has come; a pipe that nobody will write to any more is not listened to."""
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
