"""Hosts where the processes of a run start: this machine, and the other nodes that an engine offers.

The rest of the launcher addresses hosts by number, and processes by handle. Only `launch/engines` depends on
the engine that starts them on other nodes: Slurm's srun, or Ray.
"""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from buckeye.base.heartbeat import HEARTBEAT_VARIABLE
from buckeye.base.process import ChildProcess, hand_over_secrets
from buckeye.launch.plan import PlanNode, Role
from buckeye.launch.preflight.devices import Machine
from buckeye.launch.remote_process import RemoteProcess


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


class Host(ABC):
    """Another node of a run, which reaches this host at the address `head`."""

    def __init__(self, head: str) -> None:
        self._head = head

    def facts(self) -> HostFacts:
        """Return the version, devices and addresses of the host."""
        return self._facts

    @cached_property
    def _facts(self) -> HostFacts:
        return msgspec.convert(self._request("facts", self._head), HostFacts)

    def choose_ports(self, count: int) -> list[int]:
        """Return free ports of the host."""
        return list(self._request("choose_ports", count))

    def sees(self, path: Path, content: str) -> bool:
        """Return True if the host sees a file that was just written on this host."""
        return bool(self._request("sees", str(path), content))

    @property
    @abstractmethod
    def absent(self) -> str | None:
        """Name of the host for messages if it is absent now, else None."""

    @abstractmethod
    def start(self, role: Role, env: Mapping[str, str], stdout: Path) -> RemoteProcess:
        """Start a process with the host's own Python, and append its output to `stdout`.

        It is lost if its host is lost.
        """

    @abstractmethod
    def _request(self, method: str, *args: Any) -> Any:
        """Return the result of a method of `engines.node.Node` on the host. Raises RunError."""


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """The other hosts of a run, by number from 1 on; they reach this host at `address`."""

    address: str | None = None
    hosts: dict[int, Host] = field(default_factory=dict)


def make_plan_node(number: int, host: Host) -> PlanNode:
    """Return a node with the data for `make_plan`."""
    facts = host.facts()
    return PlanNode(
        name=f"node {number} ({facts.name})",
        machine=Machine(cores=facts.cores, gpus=facts.gpus),
        choose_ports=host.choose_ports,
        address=facts.address,
        variables=facts.variables,
    )


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
