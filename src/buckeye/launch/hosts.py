"""Where the processes of a run are started: this machine, and the other nodes that an engine offers.

Everybody above knows hosts by their numbers, and processes by handles. Which engine starts them on other
nodes, Slurm's srun or Ray, is known to nobody in the core.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import psutil

from buckeye.base.heartbeat import HEARTBEAT_VARIABLE
from buckeye.base.process import ChildProcess, handed_over
from buckeye.launch.plan import Site
from buckeye.launch.preflight.devices import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A process to be started. `argv` begins with this host's Python, for which another host takes its own;
    what is printed is appended to `stdout`. `title` is what messages call it."""

    title: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stdout: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a host has. Others reach it at `address`; `variables` tell gloo and NCCL how it reaches them."""

    name: str
    version: str
    python: str
    cores: int
    gpus: tuple[int, ...]
    address: str
    variables: Mapping[str, str]


class Handle(Protocol):
    """A process that was started."""

    heartbeats: int
    """The end of the pipe that its heartbeats come from."""
    lost: str | None
    """Why nothing is known of it any more."""

    @property
    def pid(self) -> int:
        """Its number on its host."""

    @property
    def returncode(self) -> int | None:
        """The exit code; the signal that ended it, negative; None while it runs. What is left of its session
        is killed as soon as it is seen to have ended."""

    def signal(self, number: int, *, session: bool) -> None:
        """Send a signal to it, or to all processes of its session; nothing if it has ended."""

    def wait(self) -> int:
        """Until it has ended, which it was made to; the exit code."""

    def memory(self) -> int | None:
        """The bytes of memory that it uses, if that is known."""


class Host(Protocol):
    """One machine of a run."""

    @property
    def absent(self) -> str | None:
        """What messages call it if it is not there now."""

    def facts(self) -> Facts:
        """What it has."""

    def choose_ports(self, count: int) -> list[int]:
        """Free ports of it."""

    def sees(self, path: Path, content: str) -> bool:
        """Whether a file that was just written here is there, too."""

    def start(self, start: Start) -> Handle:
        """Start a process. If the host is lost, so is the process."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts of a run beside this one, by their numbers from 1 on, which reach this one at `address`."""

    address: str | None = None
    hosts: dict[int, Host] = field(default_factory=dict)


def sites_of(nodes: Nodes) -> list[Site]:
    """The other nodes as a plan sees them, in the order of their numbers."""
    return [site_of(number, host) for number, host in sorted(nodes.hosts.items())]


def site_of(number: int, host: Host) -> Site:
    """A node as a plan sees it."""
    facts = host.facts()
    return Site(
        name=f"node {number} ({facts.name})",
        machine=Machine(cores=facts.cores, gpus=facts.gpus),
        choose_ports=host.choose_ports,
        address=facts.address,
        variables=facts.variables,
    )


class LocalHost:
    """This machine."""

    def start(self, start: Start) -> Handle:
        """Call it from the main thread only: on Linux what is started ends with the thread."""
        with start.stdout.open("ab") as output:
            return LocalProcess(start.argv, env=start.env, output=output)


class LocalProcess(ChildProcess):
    """A process of this machine, and all of its session, with the pipe that its heartbeats come from. Call it
    from the main thread only: on Linux what is started ends with the thread."""

    lost: str | None = None

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], output: IO[bytes] | int, cwd: Path | None = None
    ) -> None:
        self.heartbeats, writing = os.pipe()
        plain, secret = handed_over(env)
        passed = (writing,) if secret is None else (writing, secret)
        try:
            given = {**plain, HEARTBEAT_VARIABLE: str(writing)}
            super().__init__(
                argv, env=given, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, pass_fds=passed
            )
        except BaseException:
            os.close(self.heartbeats)
            raise
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def memory(self) -> int | None:
        """See `Handle`."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return None
