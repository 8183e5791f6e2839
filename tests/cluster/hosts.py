"""Hosts on this machine with a separate network, name and processor each; they share the disk."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_COUNT = itertools.count()
_NEEDED = ("ip", "nsenter", "unshare", "taskset", "hostname")

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, _NEEDED)),
    reason="needs root on Linux, and iproute2: apt-get install iproute2",
)


@dataclass(frozen=True)
class Host:
    """Host in a network namespace, `space`."""

    name: str
    address: str
    space: str
    core: int

    def argv(self, *words: object) -> list[str]:
        """Return the command line that runs a command on the host."""
        return [
            *("nsenter", f"--net=/run/netns/{self.space}", "taskset", "-c", str(self.core)),
            *("unshare", "--uts", "--mount", "sh", "-c", 'hostname "$0" && exec "$@"'),
            *(self.name, *map(str, words)),
        ]

    def start(self, *words: object, out: Path, env: Mapping[str, str], cwd: Path) -> subprocess.Popen[bytes]:
        with out.open("ab") as file:
            return subprocess.Popen(
                self.argv(*words),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self.space], capture_output=True, text=True, check=False
        )
        return [int(line) for line in found.stdout.split()]

    def kill(self) -> None:
        """Kill all processes of the host, as if it were switched off."""
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


@contextmanager
def some_hosts(count: int = 2) -> Iterator[tuple[Host, ...]]:
    """Create hosts until the context ends; then kill all their processes."""
    number = (os.getpid() * 7 + next(_COUNT)) % 200
    cores = sorted(os.sched_getaffinity(0))
    hosts = tuple(
        Host(
            f"n{i + 1}",
            f"10.77.{number}.{i + 1}",
            f"bk{number}n{i + 1}",
            cores[i % len(cores)],
        )
        for i in range(count)
    )
    bridge = f"bk{number}br"
    try:
        for host in hosts:  # a killed test may have left its hosts
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True, check=False)
            _ip("netns", "add", host.space)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in hosts:
            link, port = f"{host.space}v", f"{host.space}p"
            _ip("link", "add", link, "type", "veth", "peer", "name", port)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("link", "set", link, "netns", host.space)
            _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", link)
            _ip("-n", host.space, "link", "set", link, "up")
            _ip("-n", host.space, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def wait_until(true: Callable[[], object], seconds: float, what: str) -> None:
    """Call `true` until it returns True."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def words_of(pid: int) -> str:
    """Return the command line of a process, empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
