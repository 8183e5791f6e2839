"""A process on another node, as the head sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from buckeye.cluster import messages as say


class RemoteProcess:
    """What `subprocess.Popen` is for a process of this host. The thread that listens to the node calls
    `heard`; what the process prints is appended to `stdout`, and its beats come out of the pipe `beats`."""

    def __init__(self, number: int, stdout: Path, tell: Callable[[say.Message], None]) -> None:
        self.number = number
        self.pid = 0
        self.lost: str | None = None
        """Why nothing is known of it any more."""
        self.beats, self._beats = os.pipe()
        os.set_blocking(self._beats, False)
        self._output = stdout.open("ab", buffering=0)
        self._tell = tell
        self._returncode: int | None = None
        self._changed = threading.Condition()

    @property
    def returncode(self) -> int | None:
        """The exit code; the signal that ended it, negative; None while it runs."""
        return self._returncode

    def poll(self) -> int | None:
        """The same: it is told, not asked for."""
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._returncode is not None, timeout):
                raise subprocess.TimeoutExpired(f"process {self.number} of a node", timeout or 0.0)
        assert self._returncode is not None
        return self._returncode

    def wait_until_started(self, timeout: float) -> bool:
        """Whether it has started, or ended already, within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.pid != 0 or self._returncode is not None, timeout)

    def send_signal(self, number: int) -> None:
        """To the process alone."""
        self._signal(number, session=False)

    def signal_session(self, number: int) -> None:
        """To all processes of its session."""
        self._signal(number, session=True)

    def heard(self, message: say.FromNode) -> None:
        """Take in what the node says of it."""
        if self._returncode is not None:
            return
        if isinstance(message, say.Started):
            with self._changed:
                self.pid = message.pid
                self._changed.notify_all()
        elif isinstance(message, say.Printed):
            with suppress(OSError):  # a full disk costs lines, as it does processes of this host
                self._output.write(message.data)
        elif isinstance(message, say.Beaten):
            with suppress(OSError):  # full, or nobody listens any more
                os.write(self._beats, here(message))
        elif isinstance(message, say.Ended):
            if message.problem is not None:
                with suppress(OSError):
                    self._output.write(f"error: it could not be started: {message.problem}\n".encode())
            self._end(message.code)

    def lose(self, why: str) -> None:
        """The node is gone, and kills what it has started, if it still can."""
        if self._returncode is None:
            self.lost = why
            self._end(-signal.SIGKILL)

    def _signal(self, number: int, *, session: bool) -> None:
        if self._returncode is None:
            self._tell(say.Signal(id=self.number, number=int(number), session=session))

    def _end(self, code: int) -> None:
        with self._changed:
            if self._returncode is not None:
                return
            os.close(self._beats)
            self._output.close()
            self._returncode = code
            self._changed.notify_all()


def here(beaten: say.Beaten) -> bytes:
    """Beats with their times on this host's monotonic clock."""
    shift = time.monotonic() - beaten.now
    lines = []
    for line in beaten.lines.splitlines():
        try:
            beat = json.loads(line)
        except ValueError:  # of a process that was killed while it wrote
            continue
        for name in ("since", "pulse"):
            if isinstance(beat, dict) and isinstance(beat.get(name), float):
                beat[name] += shift
        lines.append(json.dumps(beat).encode() + b"\n")
    return b"".join(lines)
