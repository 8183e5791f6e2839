"""Runtimes that run a command, or the server of a Python project in its own virtual environment."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from buckeye.base.process import clean_environment
from buckeye.base.threads import finish_in_thread
from buckeye.config.config_files import read_project
from buckeye.errors import BuckeyeError, UsageError
from buckeye.mcp.fork_server.program import Program
from buckeye.mcp.sandbox.confine_command import build_confine_spec, sandbox_support
from buckeye.mcp.sandbox.runtime import LaunchSpec, PrepareError, SandboxLimits, cache_folder, check_output
from buckeye.mcp.tasks.task_schema import StdioServer
from buckeye.mcp.workdir.folder import create_workdir
from buckeye.mcp.workdir.initial_files import SizeLimit
from buckeye.mcp.workdir.server_environment import adapt_to_workdir, find_unreachable_files

log = logging.getLogger(__name__)

_INSTALL_SECONDS = 1200.0
_PROJECT = "project"
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
_NOT_SOURCE = {"__pycache__", "node_modules", "build", "dist"}


class CommandRuntime:
    """Runs the same command for every session. Each session has its own folder with a copy of `files`."""

    name, environment_flag = "command", "--command"

    def __init__(self, argv: Sequence[str], limits: SandboxLimits, files: Path | None = None) -> None:
        """Raise UsageError if the program or `files` does not exist."""
        if not argv or shutil.which(argv[0]) is None:
            problem = f"program not found in PATH: {shlex.join(argv[:1])!r}"
            raise _not_found(problem, "install the program, or write its path", at="--command")
        if files is not None and not files.exists():
            hint = f"write a path relative to {Path.cwd()}, or an absolute path"
            raise _not_found(f"file or folder not found: {files}", hint, at="--files")
        self._server, self._limits = StdioServer(command=argv[0], args=list(argv[1:])), limits
        self._files = str(files.absolute()) if files is not None else None
        self.description = sandbox_support().describe()
        for path in find_unreachable_files(self._server) if files is None else ():
            log.warning(
                "The argument %s is a path in this folder, but servers start in the session's folder. Copy "
                "the path with `--files %s` and write `{workdir}` in the argument. If sessions may share "
                "the path, write an absolute path",
                path,
                path,
            )

    async def prepare(self, image: str) -> None:
        """Do nothing, because a command needs no preparation."""

    async def launch(self, image: str, session_folder: Path, variables: Mapping[str, str]) -> LaunchSpec:
        """Return the launch of the command in a new folder in `session_folder`."""
        server = self._server.model_copy(update={"env": dict(variables)})
        return await finish_in_thread(
            _prepare_launch, server, self._files, "--files", self._limits, session_folder
        )


class FolderRuntime:
    """Runs the server of a Python project for every session, in a copy of the project.

    The runtime installs the project before the first session. It reuses an installation of identical files.
    """

    name = "dir"

    def __init__(self, folder: Path, limits: SandboxLimits) -> None:
        """Raise UsageError if the folder is not a Python project, or does not define a server command."""
        self._folder, self._limits = folder.resolve(), limits
        self._command = server_command(self._folder)
        self.environment_flag = f"--dir {folder}"
        self.description = sandbox_support().describe()
        self._installed: Path | None = None

    async def prepare(self, image: str) -> None:
        """Install the project, or find an installation of identical files."""
        if self._installed is None:
            self._installed = await asyncio.to_thread(_install_once, self._folder)

    async def launch(self, image: str, session_folder: Path, variables: Mapping[str, str]) -> LaunchSpec:
        """Return the launch of the project's server in a new folder in `session_folder`."""
        await self.prepare(image)
        assert self._installed is not None
        programs = self._installed / "bin"
        program = programs / self._command[0]
        path = f"{programs}{os.pathsep}{clean_environment({})['PATH']}"
        server = StdioServer(
            command=str(program) if program.exists() else self._command[0],
            args=self._command[1:],
            env={"PATH": path, "VIRTUAL_ENV": str(self._installed), **variables},
        )
        return await finish_in_thread(
            _prepare_launch, server, str(self._installed / _PROJECT), "--dir", self._limits, session_folder
        )


def _prepare_launch(
    server: StdioServer, files: str | None, flag: str, limits: SandboxLimits, session_folder: Path
) -> LaunchSpec:
    """Return the launch of a server in a sandbox and in a new folder with a copy of `files`.

    Raises PrepareError. The error names `flag` as the source of `files`.
    """
    failed = "cannot create the session's folder"
    try:
        workdir = create_workdir(session_folder, files, SizeLimit(limits.disk, "--disk"))
    except BuckeyeError as error:
        raise PrepareError(f"{failed}: {error.message}", code=error.code, at=flag, hint=error.hint) from None
    except OSError as error:
        raise PrepareError(f"{failed}: {error}", code="BK-ENV-FAILED") from None
    server = adapt_to_workdir(server, workdir)
    confine = build_confine_spec(limits=limits, sandbox_support=sandbox_support(), cwd=workdir.path)
    program = Program(
        argv=(server.command, *server.args),
        env=clean_environment(server.env),
        cwd=workdir.path,
        confine=confine,
    )
    # The fork server cannot remove network access or make folders read-only.
    return LaunchSpec(program=program, can_fork=limits.network and limits.writable is None)


def _not_found(message: str, hint: str, *, at: str) -> UsageError:
    return UsageError(message, code="BK-FILE-NOT-FOUND", at=at, hint=hint)


def server_command(folder: Path) -> list[str]:
    """Return the server command of a Python project. Raises UsageError if the project defines none.

    The command is `[tool.buckeye] command` of pyproject.toml, else the project's only script, else the script
    with the project's name.
    """
    file = folder / "pyproject.toml"
    if not file.exists():
        hint = "use `--command` for other programs"
        raise _not_found(f"{folder} has no pyproject.toml", hint, at="--dir")
    project = read_project(file)
    command: Any = project.get("tool", {}).get("buckeye", {}).get("command")
    if isinstance(command, list) and command and all(isinstance(part, str) for part in command):
        return command
    if command is not None:
        raise UsageError(
            "expected a list of strings",
            code="BK-CONFIG-VALUE",
            at=f"{file} (tool.buckeye.command)",
            hint='write `command = ["my-server", "--stdio"]`',
        )
    scripts: dict[str, str] = project.get("project", {}).get("scripts", {})
    name = project.get("project", {}).get("name", "")
    selected = [script for script in scripts if len(scripts) == 1 or script == name]
    if not selected:
        raise UsageError(
            f"cannot choose the MCP server: {len(scripts)} scripts in [project.scripts], none named {name!r}",
            code="BK-CONFIG-MISSING",
            at=str(file),
            hint='add [tool.buckeye] with `command = ["..."]`',
        )
    return selected


def _install_once(folder: Path) -> Path:
    """Return a virtual environment with the project. Its folder `_PROJECT` is a copy of the project.

    If a file of the project has changed, except a hidden file, install a new environment and keep the old
    one. Raises PrepareError with the installer's last output.
    """
    digest = hashlib.sha256(os.fsencode(f"{sys.version}\0{folder}"))
    for path in _source_files(folder):
        digest.update(
            os.fsencode(f"\0{path.relative_to(folder)}\0") + hashlib.sha256(path.read_bytes()).digest()
        )
    environments = cache_folder() / "environments"
    target = environments / f"{folder.name}-{digest.hexdigest()[:16]}"
    environments.mkdir(parents=True, exist_ok=True)
    with (environments / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / _PROJECT).exists():
            shutil.rmtree(target, ignore_errors=True)
            _install(folder, target)
    return target


def _install(folder: Path, target: Path) -> None:
    # install from a copy, because build tools write next to the sources
    with tempfile.TemporaryDirectory(prefix="buckeye-install-") as temporary:
        copy = Path(temporary, folder.name)
        _copy_sources(folder, copy)
        uv = shutil.which("uv")
        python = str(target / "bin" / "python")
        create = [uv, "venv", "--quiet", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        install = [uv, "pip", "install", "--quiet", "--python", python] if uv else [python, *_PIP]
        for argv in ([*create, str(target)], [*install, str(copy)]):
            check_output(argv, _INSTALL_SECONDS, f"cannot install {folder}", code="BK-ENV-INSTALL")
    part = target / f".{_PROJECT}"
    _copy_sources(folder, part)
    part.rename(target / _PROJECT)  # this folder marks a complete environment


def _copy_sources(folder: Path, to: Path) -> None:
    for path in _source_files(folder):
        target = to / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def _source_files(folder: Path) -> Iterator[Path]:
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
