"""Handle of a process on another node."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_REPORT_SECONDS = (
    120.0  # if the node does not report the end of a process within this time, it counts as lost
)


class RemoteProcess:
    """Handle of a process on another node.

    The engine calls `record_start`, `record_output`, `record_heartbeats`, `record_end` and `record_loss` for
    the events of the process, from any thread. `send` sends a signal to the process.
    """

    def __init__(self, stdout: Path, send: Callable[[int, bool], None]) -> None:
        self.pid = 0
        self.lost: str | None = None
        self.heartbeats, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._output = stdout.open("ab", buffering=0)
        self._send = send
        self._returncode: int | None = None
        self._changed = threading.Condition()

    @property
    def returncode(self) -> int | None:
        """Exit code, or None while the process runs."""
        return self._returncode

    def signal(self, number: int, *, session: bool) -> None:
        """Send a signal to the process, or to its session, unless it has ended."""
        if self._returncode is None:
            self._send(int(number), session)

    def wait(self) -> int:
        """Wait until the process ends, and return its exit code. Call it after SIGKILL.

        If the node reports no end within 120 s, the process counts as lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._returncode is not None, _REPORT_SECONDS)
        self.record_loss(f"was killed {_REPORT_SECONDS:.0f} s ago, but its node did not report its end")
        assert self._returncode is not None
        return self._returncode

    def memory(self) -> int | None:
        """Return None, because the memory use on another node is unknown."""
        return None

    def record_start(self, pid: int) -> None:
        """Record that the process has started."""
        self.pid = pid

    def record_output(self, data: bytes) -> None:
        """Append output of the process to its log."""
        with self._changed, suppress(OSError):  # on a full disk the output is lost
            if self._returncode is None:
                self._output.write(data)

    def record_heartbeats(self, lines: bytes, now: float) -> None:
        """Write heartbeats to the pipe `heartbeats`, with times on the monotonic clock of this host.

        `now` is the time on the monotonic clock of the node when it sent the heartbeats.
        """
        with self._changed, suppress(OSError):  # the pipe is full or closed
            if self._returncode is None:
                os.write(self._pipe, shift_clock(lines, time.monotonic() - now))

    def record_end(self, code: int, problem: str | None = None) -> None:
        """Record that the process has ended with exit code `code`.

        If the node could not start the process, `problem` is the reason.
        """
        if problem is not None:
            self.record_output(f"error: cannot start the process: {problem}\n".encode())
        with self._changed:
            if self._returncode is not None:
                return
            os.close(self._pipe)
            self._output.close()
            self._returncode = code
            self._changed.notify_all()

    def record_loss(self, reason: str) -> None:
        """Record that the node does not respond any more, so that the process is lost."""
        if self._returncode is None:
            self.lost = reason
            self.record_end(-signal.SIGKILL)


def shift_clock(lines: bytes, shift: float) -> bytes:
    """Return heartbeats with their times shifted by `shift` seconds."""
    shifted = []
    for line in lines.splitlines():
        try:
            heartbeat = json.loads(line)
        except ValueError:  # an incomplete line: the process was killed while it wrote
            continue
        for name in ("since", "pulse"):
            if isinstance(heartbeat, dict) and isinstance(heartbeat.get(name), float):
                heartbeat[name] += shift
        shifted.append(json.dumps(heartbeat).encode() + b"\n")
    return b"".join(shifted)
