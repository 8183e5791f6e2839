"""Interface between the gateway and the runtimes that start its environments."""

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
    """A runtime does not work on this machine. The message names the missing part."""

    code = "BK-SANDBOX"


class PrepareError(BuckeyeError):
    """The preparation of an environment failed, for example because its image is unknown."""

    code = "BK-IMAGE"


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Resource limits of one environment. None: no limit."""

    memory: int | None = None
    """Maximum memory in bytes: of all processes together in a container, or else of each process."""
    cpus: float | None = None
    """Maximum CPU cores. Only containers support this limit."""
    network: bool = True
    """Allow network access."""
    processes: int = 1024
    """Maximum number of processes and threads at a time."""
    disk: int = 4 * 2**30
    """Maximum size in bytes of one file, and of a session's folder."""
    writable: tuple[str, ...] | None = None
    """Folders that the environment may write to. None: all folders. Requires namespaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """Program to start for one session."""

    program: Program
    can_fork: bool = False
    """True if a fork server may start the program."""
    on_exit: Callable[[], Awaitable[None]] | None = None
    """Function that removes data outside the session's folder. The gateway calls it after the process."""


class Runtime(Protocol):
    """Creates environments. `image` is the image of a session. Runtimes without images ignore `image`."""

    name: str
    description: str
    """Isolation between sessions, as text for log lines."""
    environment_flag: str
    """Command-line flag that set the environment of all sessions. "" for a runtime of images."""

    async def prepare(self, image: str) -> None:
        """Do slow work once per image, such as a download or an installation. Raises PrepareError."""

    async def launch(self, image: str, session_folder: Path, variables: Mapping[str, str]) -> LaunchSpec:
        """Return the launch of a session. `session_folder` is empty, and is deleted after the session."""


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

    Raises PrepareError with `code` and `hint` if the program fails or exceeds `seconds`. The message begins
    with `failed`, and ends with the last lines of the output.
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
