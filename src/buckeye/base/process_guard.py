"""Kills process groups when the process that started them is gone, however it ended.

A server may have children of its own (`npx`, `uvx`), so a death signal to the server alone is not enough. One
small process per Buckeye process reads `+PGID` and `-PGID` from its standard input; the kernel closes that
when the Buckeye process ends, even by SIGKILL, and whatever group is still listed is then killed. So is what
has left its group: a program that is started with a mark in its environment leaves it to its children.

The file is run as a script, without site packages, so it imports nothing of Buckeye.
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

MARK = "BUCKEYE_STARTED_BY"
"""The variable with the mark."""
_ROUNDS = 10  # of looking for what was started meanwhile


def kill_marked(mark: str) -> None:
    """Kill every process that was started, however indirectly, with a mark that begins so. Linux only."""
    wanted = f"\0{MARK}={mark}".encode()
    for _ in range(_ROUNDS):
        found = [pid for pid in _processes() if wanted in _environment(pid)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:  # not Linux
        return []


def _environment(pid: int) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


class Guard:
    """This process's end of its guard, which is started with the first group and again if it died."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._mark = secrets.token_hex(8)

    def new_mark(self) -> str:
        """A value for `MARK` in the environment of what is to be killed with this process."""
        return f"{self._mark}.{secrets.token_hex(8)}"

    def watch(self, group: int) -> None:
        """Have the group killed when this process ends."""
        with self._lock:
            self._groups.add(group)
            if self._process is None or not self._told(f"+{group}"):
                self._start()

    def forget(self, group: int) -> None:
        """The group has ended."""
        with self._lock:
            self._groups.discard(group)
            if self._process is not None and not self._told(f"-{group}"):
                self._process = None

    def _start(self) -> None:
        if self._process is not None:
            self._process.wait()
        self._process = subprocess.Popen(  # noqa: S603  a list of words, without a shell
            [sys.executable, "-I", "-S", __file__, self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        for group in self._groups:
            self._told(f"+{group}")

    def _told(self, line: str) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())
        except BrokenPipeError:
            return False
        return True


GUARD = Guard()


def main() -> None:
    """Keep the list until the other end is closed; then kill what is on it."""
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
