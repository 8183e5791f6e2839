"""Kills process groups when the process that started them is gone, however it ended.

A server may have children of its own (`npx`, `uvx`), so a death signal to the server alone is not enough. One
small process per Buckeye process reads `+PGID` and `-PGID` from its standard input; the kernel closes that
when the Buckeye process ends, even by SIGKILL, and whatever group is still listed is then killed.

The file is run as a script, without site packages, so it imports nothing of Buckeye.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


class Guard:
    """This process's end of its guard, which is started with the first group and again if it died."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

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
            [sys.executable, "-I", "-S", __file__],
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


if __name__ == "__main__":
    main()
