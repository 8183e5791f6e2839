"""Hosts where the processes of a run start: this machine, and the other nodes that an engine offers.

The rest of the launcher addresses hosts by number, and processes by handle. Only `launch/engines` depends on
the engine that starts them on other nodes: Slurm's srun, or Ray.
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
from buckeye.base.process import ChildProcess, hand_over_secrets
from buckeye.launch.plan import PlanNode
from buckeye.launch.preflight.devices import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """A process to start.

    `argv` begins with the Python of this host; another host replaces it by its own. The output is appended to
    `stdout`. `title` names the process in messages.
    """

    title: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stdout: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Version, devices and addresses of a host.

    Other hosts reach it at `address`; `variables` configure the network interfaces of gloo and NCCL.
    """

    name: str
    version: str
    python: str
    cores: int
    gpus: tuple[int, ...]
    address: str
    variables: Mapping[str, str]


class ProcessHandle(Protocol):
    """A started process."""

    heartbeats: int
    """File descriptor for reading its heartbeats."""
    lost: str | None
    """Reason why the process can no longer be observed, or None."""

    @property
    def pid(self) -> int:
        """Process id on its host."""

    @property
    def returncode(self) -> int | None:
        """Exit code, the negative signal number if a signal ended it, or None while it runs.

        Once the process is seen to have ended, the rest of its session is killed.
        """

    def signal(self, number: int, *, session: bool) -> None:
        """Send a signal to the process, or to all processes of its session; do nothing if it has ended."""

    def wait(self) -> int:
        """Wait until a process that was signaled to end has ended; return its exit code."""

    def memory(self) -> int | None:
        """Return its memory use in bytes, or None if unknown."""


class Host(Protocol):
    """One machine of a run."""

    @property
    def absent(self) -> str | None:
        """Name of the host for messages if it is absent now, else None."""

    def facts(self) -> HostFacts:
        """Return the version, devices and addresses of the host."""

    def choose_ports(self, count: int) -> list[int]:
        """Return free ports of the host."""

    def sees(self, path: Path, content: str) -> bool:
        """Return True if the host sees a file that was just written on this host."""

    def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start a process; it is lost if its host is lost."""


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """The other hosts of a run, by number from 1 on; they reach this host at `address`."""

    address: str | None = None
    hosts: dict[int, Host] = field(default_factory=dict)


def make_plan_nodes(nodes: OtherNodes) -> list[PlanNode]:
    """Return the other nodes as sites of a plan, in the order of their numbers."""
    return [make_plan_node(number, host) for number, host in sorted(nodes.hosts.items())]


def make_plan_node(number: int, host: Host) -> PlanNode:
    """Return a node as a site of a plan."""
    facts = host.facts()
    return PlanNode(
        name=f"node {number} ({facts.name})",
        machine=Machine(cores=facts.cores, gpus=facts.gpus),
        choose_ports=host.choose_ports,
        address=facts.address,
        variables=facts.variables,
    )


class LocalHost:
    """This machine."""

    def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start a process. Call this from the main thread only: on Linux the process ends with its thread."""
        with spec.stdout.open("ab") as output:
            return LocalProcess(spec.argv, env=spec.env, output=output)


class LocalProcess(ChildProcess):
    """A process of this machine, with its session and the pipe of its heartbeats.

    Create it in the main thread only: on Linux the process ends with the thread that started it.
    """

    lost: str | None = None

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], output: IO[bytes] | int, cwd: Path | None = None
    ) -> None:
        self.heartbeats, write_end = os.pipe()
        plain, secret_pipe = hand_over_secrets(env)
        passed = (write_end,) if secret_pipe is None else (write_end, secret_pipe)
        try:
            super().__init__(
                argv,
                env={**plain, HEARTBEAT_VARIABLE: str(write_end)},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                pass_fds=passed,
            )
        except BaseException:
            os.close(self.heartbeats)
            raise
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def memory(self) -> int | None:
        """Return its resident memory in bytes, or None if it has ended."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return None
