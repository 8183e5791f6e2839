"""Guard process: it kills process groups when the process that started them has ended for any reason.

Programs such as `npx` and `uvx` start the server as their child, so it is not enough to kill the program. A
process of Buckeye that starts such programs also starts a guard process. The guard reads `+PGID` and `-PGID`
from its standard input. When the process of Buckeye ends, even by SIGKILL, the kernel closes this pipe, and
the guard kills all listed groups.

A child may leave its process group. So programs get a mark in an environment variable, which all their
children inherit. The guard also kills all processes with its mark.

This file runs as a script without site packages, so it imports nothing of Buckeye.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

MARK_VARIABLE = "BUCKEYE_STARTED_BY"
"""Environment variable that contains the mark."""
_ROUNDS = 10  # number of searches, because a process may start others before it is killed


def kill_marked(mark: str) -> None:
    """Kill every process whose mark starts with `mark`."""
    entry = f"\0{MARK_VARIABLE}={mark}".encode()
    for _ in range(_ROUNDS):
        running = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        marked = [pid for pid in running if entry in _environment(pid)]
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not marked:
            return


def _environment(pid: int) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return b""


class Guard:
    """Client of the guard process. It starts the guard for the first group, and restarts an ended guard."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._mark = secrets.token_hex(8)

    def new_mark(self) -> str:
        """Return a new mark for a program. The guard kills the program when this process ends."""
        return f"{self._mark}.{secrets.token_hex(8)}"

    def mark_children(self) -> None:
        """Mark all programs that this process starts after this call."""
        with self._lock:
            if self._process is None:
                self._start()
        os.environ[MARK_VARIABLE] = f"{self._mark}.{MARK_VARIABLE}"

    def watch(self, group: int) -> None:
        """Let the guard kill the group when this process ends."""
        with self._lock:
            self._groups.add(group)
            if self._process is None or not self._send(f"+{group}"):
                self._start()

    def forget(self, group: int) -> None:
        """Remove a group that has ended from the list of the guard."""
        with self._lock:
            self._groups.discard(group)
            if self._process is not None and not self._send(f"-{group}"):
                self._process = None

    def _start(self) -> None:
        if self._process is not None:
            self._process.wait()
        self._process = subprocess.Popen(  # noqa: S603, an argument list without a shell
            [sys.executable, "-I", "-S", __file__, self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        for group in self._groups:
            self._send(f"+{group}")

    def _send(self, line: str) -> bool:
        """Send a line to the guard. Return False if the guard has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())
        except BrokenPipeError:
            return False
        return True


GUARD = Guard()


def main() -> None:
    """Read the list of groups until stdin is closed, then kill these groups and all marked processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    kill_marked(f"{sys.argv[1]}.")


if __name__ == "__main__":
    main()
