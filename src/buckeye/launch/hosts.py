"""Hosts where the processes of a run start: this machine, and the other nodes that an engine provides.

An engine is Slurm's srun or Ray. Only `launch/engines` depends on it. The rest of the launcher uses the
number of a host, and the handle of a process.
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

    Other hosts reach the host at `address`. `variables` select the network interfaces of gloo and NCCL.
    """

    name: str
    version: str
    python: str
    cores: int
    gpus: tuple[int, ...]
    address: str
    variables: Mapping[str, str]


class Host(ABC):
    """Another node of a run. The node reaches the launcher's host at the address `head`."""

    def __init__(self, head: str) -> None:
        self._head = head

    def facts(self) -> HostFacts:
        """Return the version, devices and addresses of the host."""
        return self._facts

    @cached_property
    def _facts(self) -> HostFacts:
        return msgspec.convert(self._request("facts", self._head), HostFacts)

    def choose_ports(self, count: int) -> list[int]:
        """Reserve `count` free ports of the host and return them."""
        return list(self._request("choose_ports", count))

    def sees(self, path: Path, content: str) -> bool:
        """Return True if the host can read the file that this process has written to `path`."""
        return bool(self._request("sees", str(path), content))

    @property
    @abstractmethod
    def absent(self) -> str | None:
        """Name of the host for messages if it is absent now, else None."""

    @abstractmethod
    def start(self, role: Role, env: Mapping[str, str], stdout: Path) -> RemoteProcess:
        """Start a process with the Python of the host, and append its output to `stdout`.

        If the host is lost, the process counts as lost.
        """

    @abstractmethod
    def _request(self, method: str, *args: Any) -> Any:
        """Return the result of a method of `engines.node.Node` on the host. Raises RunError."""


@dataclass(frozen=True, slots=True)
class OtherNodes:
    """The other hosts of a run, numbered from 1. They reach this host at `address`."""

    address: str | None = None
    hosts: dict[int, Host] = field(default_factory=dict)


def make_plan_node(number: int, host: Host) -> PlanNode:
    """Return the node as `make_plan` needs it."""
    facts = host.facts()
    return PlanNode(
        name=f"node {number} ({facts.name})",
        machine=Machine(cores=facts.cores, gpus=facts.gpus),
        choose_ports=host.choose_ports,
        address=facts.address,
        variables=facts.variables,
    )


class LocalProcess(ChildProcess):
    """A process on this machine, with its own session and a pipe for its heartbeats.

    Create it in the main thread only: Linux kills the process when the thread that started it ends.
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
        """Return the resident memory of the process in bytes, or None if the process has ended."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return None
