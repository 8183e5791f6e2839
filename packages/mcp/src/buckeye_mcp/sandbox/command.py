"""Environments that are a command, or a project folder installed into a virtual environment of its own."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from buckeye.base.process import clean_environment, run_program
from buckeye.errors import UsageError
from buckeye_mcp.fork_server.program import Program
from buckeye_mcp.sandbox.base import Launch, Limits, PrepareError, cache_folder
from buckeye_mcp.sandbox.confinement import confined_by, confined_environment, confinement, walls

_INSTALL_SECONDS = 1200.0
_NOT_SOURCE = {"__pycache__", "node_modules", "build", "dist"}


class CommandRuntime:
    """Runs one command for every session, in the folder the gateway was started in."""

    name = "command"

    def __init__(self, argv: Sequence[str], limits: Limits, *, cwd: Path | None = None) -> None:
        """Raises UsageError if there is no such program."""
        cwd = cwd or Path.cwd()
        if not argv or shutil.which(argv[0]) is None:
            raise UsageError(f"--command: there is no program {shlex.join(argv[:1])!r} (PATH was searched).")
        self._argv, self._limits, self._cwd = tuple(argv), limits, cwd
        self.about = walls().describe()

    async def prepare(self, image: str) -> None:
        """Nothing to do."""

    async def launch(self, image: str, place: Path, variables: Mapping[str, str]) -> Launch:
        """The command; its temporary files go to `place`."""
        return command_launch(self._argv, self._limits, cwd=self._cwd, place=place, variables=variables)


class FolderRuntime:
    """Installs a Python project once per state of its files, and runs its server for every session."""

    name = "dir"

    def __init__(self, folder: Path, limits: Limits) -> None:
        """Raises UsageError if the folder is no project, or does not say what its server is."""
        self._folder, self._limits = folder.resolve(), limits
        self._command = server_command(self._folder)
        self.about = walls().describe()
        self._bin: Path | None = None

    async def prepare(self, image: str) -> None:
        """Install it, unless this state of its files is installed already."""
        if self._bin is None:
            self._bin = (await asyncio.to_thread(installed, self._folder)) / "bin"

    async def launch(self, image: str, place: Path, variables: Mapping[str, str]) -> Launch:
        """The server out of the virtual environment, with the folder as its working directory."""
        await self.prepare(image)
        assert self._bin is not None
        path = f"{self._bin}{os.pathsep}{clean_environment({})['PATH']}"
        program = self._bin / self._command[0]
        argv = (str(program) if program.exists() else self._command[0], *self._command[1:])
        variables = {"PATH": path, "VIRTUAL_ENV": str(self._bin.parent), **variables}
        return command_launch(argv, self._limits, cwd=self._folder, place=place, variables=variables)


def command_launch(
    argv: Sequence[str], limits: Limits, *, cwd: Path, place: Path, variables: Mapping[str, str]
) -> Launch:
    """A command behind the walls of this machine."""
    confine = confinement(limits=limits, walls=walls(), cwd=cwd)
    program = Program(
        argv=tuple(argv),
        env=clean_environment({"TMPDIR": str(place), **variables}),
        cwd=cwd,
        confine=confine,
        outer=lambda inner, env: (confined_by(confine, inner), confined_environment(env)),
    )
    outer, env = program.command_line(program.argv)
    # a process that imports ahead has the network
    return Launch(argv=outer, env=env, cwd=cwd, program=program if limits.network else None)


def server_command(folder: Path) -> list[str]:
    """What `[tool.buckeye] command` in pyproject.toml says, or else the project's script: the only one, or
    the one of the project's name. Raises UsageError."""
    file = folder / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"--dir: {folder} has no pyproject.toml; use --command for other programs."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--dir: {file} cannot be read: {error}") from None
    command: Any = project.get("tool", {}).get("buckeye", {}).get("command")
    if isinstance(command, list) and command and all(isinstance(word, str) for word in command):
        return command
    if command is not None:
        raise UsageError(f'{file}: tool.buckeye.command is a list of words, as ["my-server", "--stdio"].')
    scripts: dict[str, str] = project.get("project", {}).get("scripts", {})
    name = project.get("project", {}).get("name", "")
    chosen = [script for script in scripts if len(scripts) == 1 or script == name]
    if not chosen:
        raise UsageError(
            f"{file} does not say which program is the MCP server: it has {len(scripts)} [project.scripts], "
            f'none named {name!r}. Add [tool.buckeye] with command = ["..."].'
        )
    return chosen


def installed(folder: Path) -> Path:
    """A virtual environment with the project in it. Made anew when a file of the project changes.

    Raises PrepareError with the installer's last words.
    """
    digest = hashlib.sha256(f"{sys.version}\0{folder}".encode())
    for path in _sources(folder):
        digest.update(f"\0{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    environments = cache_folder() / "environments"
    target = environments / f"{folder.name}-{digest.hexdigest()[:16]}"
    environments.mkdir(parents=True, exist_ok=True)
    with (environments / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / ".complete").exists():
            shutil.rmtree(target, ignore_errors=True)
            _install(folder, target)
            (target / ".complete").touch()
    return target


def _install(folder: Path, target: Path) -> None:
    # from a copy: build tools write beside the sources
    with tempfile.TemporaryDirectory(prefix="buckeye-install-") as temporary:
        copy = Path(temporary, folder.name)
        for path in _sources(folder):
            to = copy / path.relative_to(folder)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)
        uv = shutil.which("uv")
        python = str(target / "bin" / "python")
        if uv is not None:
            _run([uv, "venv", "--quiet", "--python", sys.executable, str(target)], folder)
            _run([uv, "pip", "install", "--quiet", "--python", python, str(copy)], folder)
        else:
            _run([sys.executable, "-m", "venv", str(target)], folder)
            _run(
                [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(copy)], folder
            )


def _run(argv: list[str], folder: Path) -> None:
    try:
        ran = run_program(argv, seconds=_INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise PrepareError(f"{folder} did not install within {_INSTALL_SECONDS:g} s.") from None
    if ran.returncode != 0:
        words = "\n".join((ran.stderr or ran.stdout).strip().splitlines()[-12:])
        raise PrepareError(f"{folder} does not install ({shlex.join(argv[:4])} ...):\n{words}")


def _sources(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _NOT_SOURCE and name[0] != "." and not name.endswith(".egg-info")
        )
        for name in sorted(files):
            path = Path(parent, name)
            if name[0] != "." and path.is_file() and not name.endswith(".pyc"):
                yield path
