"""Interface of a runtime, as the gateway uses it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from buckeye.base.process import run_program
from buckeye.errors import BuckeyeError
from buckeye.mcp.fork_server.program import Program


class RuntimeUnavailableError(BuckeyeError):
    """A runtime cannot be used on this machine. The message names the missing part."""

    code = "BK-SANDBOX"


class PrepareError(BuckeyeError):
    """An environment cannot be prepared: unknown image, unreachable registry, or failed installation."""

    code = "BK-IMAGE"


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Resource limits of one environment. None: no limit."""

    memory: int | None = None
    """Bytes. Containers count all their processes; other runtimes limit each process."""
    cpus: float | None = None
    """CPU cores; containers only."""
    network: bool = True
    """False removes network access."""
    processes: int = 1024
    """Maximum number of processes and threads at a time."""
    disk: int = 4 * 2**30
    """Maximum bytes of one file, and of a session's folder in total."""
    writable: tuple[str, ...] | None = None
    """Only folders that the environment may write to. Requires namespaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """Process of one session."""

    program: Program
    can_fork: bool = False
    """True if the fork server may start it."""
    on_exit: Callable[[], Awaitable[None]] | None = None
    """Called after the process has ended for any reason; removes data outside the session's folder."""


class Runtime(Protocol):
    """Creates environments. `image` is the image of a session; runtimes without images ignore it."""

    name: str
    description: str
    """Isolation between sessions, as text."""
    environment_flag: str
    """Flag that names the environment of all sessions; "" for a runtime of images."""

    async def prepare(self, image: str) -> None:
        """Do slow one-time work: download, unpack, install. Raises PrepareError."""

    async def launch(self, image: str, session_folder: Path, variables: Mapping[str, str]) -> LaunchSpec:
        """Return a session's process. `session_folder` is its own empty folder, deleted after the session."""


def cache_folder() -> Path:
    """Return the cache folder for images and installed environments."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "buckeye"


def check_output(
    argv: Sequence[str],
    seconds: float,
    failed: str,
    *,
    code: str | None = None,
    hint: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a program and return its output, stripped.

    Raises PrepareError if it fails or exceeds `seconds`. The message begins with `failed` and ends with the
    last lines of the output; `code` and `hint` are those of the error.
    """
    try:
        result = run_program(argv, seconds=seconds, env=env, cwd=cwd)
    except subprocess.TimeoutExpired:
        message = f"{failed}: `{argv[0]} {argv[1]}` timed out after {seconds:g} s"
        raise PrepareError(message, code=code, hint=hint) from None
    if result.returncode != 0:
        lines = "\n".join((result.stderr or result.stdout).strip().splitlines()[-12:])
        reason = lines or f"exit code {result.returncode}"
        raise PrepareError(f"{failed}:\n{reason}", code=code, hint=hint)
    return result.stdout.strip()
