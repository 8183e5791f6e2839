"""What the gateway asks of a runtime."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from buckeye.base.process import run_program
from buckeye.errors import BuckeyeError
from buckeye.mcp.fork_server.program import Program


class RuntimeUnavailable(BuckeyeError):
    """A runtime cannot be used on this machine; the message says what is missing."""


class PrepareError(BuckeyeError):
    """An environment cannot be prepared: no such image, a registry that refuses, a folder that does not
    install."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one environment may use. None is no limit."""

    memory: int | None = None
    """Bytes. Containers count all their processes; the other runtimes limit each process."""
    cpus: float | None = None
    """Processors; containers only."""
    network: bool = True
    """False takes the network away."""
    processes: int = 1024
    """Processes and threads at a time."""
    disk: int = 4 * 2**30
    """Bytes of one file, and of all in the folder of a session."""
    writable: tuple[str, ...] | None = None
    """The only folders that it may write to, where there are namespaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A process to start for one session."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    program: Program | None = None
    """What the process becomes, where its libraries may be imported ahead."""
    after: Callable[[], Awaitable[None]] | None = None
    """Called once the process has ended, however; removes what it leaves outside its folder."""


class Runtime(Protocol):
    """Makes environments. `image` is what a session asks for; a runtime with one environment ignores it."""

    name: str
    about: str
    """For people: how far its sessions are apart."""
    serves: str
    """The one environment that it has, whatever a session asks for; "" for a runtime of images."""

    async def prepare(self, image: str) -> None:
        """Do what takes long and is done once: fetch, unpack, install. Raises PrepareError."""

    async def launch(self, image: str, place: Path, variables: Mapping[str, str]) -> Launch:
        """A session's process. `place` is an empty folder of its own, removed after it."""


@dataclass(slots=True)
class Places:
    """Folders of sessions, under one that this gateway owns."""

    root: Path
    _count: int = field(default=0)

    def new(self) -> Path:
        """A fresh empty folder that only this user can enter."""
        self._count += 1
        place = self.root / f"{self._count}-{secrets.token_hex(4)}"
        place.mkdir(mode=0o700)
        return place


def cache_folder() -> Path:
    """Where images and installed environments are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "buckeye"


def output_of(argv: Sequence[str], seconds: float, failed: str) -> str:
    """What a program prints. Raises PrepareError, which begins with `failed` and ends with its last words."""
    try:
        ran = run_program(argv, seconds=seconds)
    except subprocess.TimeoutExpired:
        raise PrepareError(f"{failed}: {argv[0]} {argv[1]} took longer than {seconds:g} s.") from None
    if ran.returncode != 0:
        words = "\n".join((ran.stderr or ran.stdout).strip().splitlines()[-12:])
        raise PrepareError(f"{failed}:\n{words}")
    return ran.stdout.strip()
