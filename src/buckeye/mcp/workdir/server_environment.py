"""Adapt a server to start in a rollout's folder: its paths, home folder, temporary files and programs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from buckeye.mcp.tasks.task_schema import StdioServer
from buckeye.mcp.workdir.folder import Workdir

_FOLDERS = {
    "HOME": "home",
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": "home/.cache",
    "XDG_CONFIG_HOME": "home/.config",
    "XDG_DATA_HOME": "home/.local/share",
    "XDG_STATE_HOME": "home/.local/state",
    "XDG_RUNTIME_DIR": "run",
}
_USER_PROGRAMS = {
    "PYTHONUSERBASE": ".local",
    "UV_CACHE_DIR": ".cache/uv",
    "UV_PYTHON_INSTALL_DIR": ".local/share/uv/python",
    "UV_TOOL_DIR": ".local/share/uv/tools",
    "PIPX_HOME": ".local/share/pipx",
    "npm_config_cache": ".npm",
    "NVM_DIR": ".nvm",
    "VOLTA_HOME": ".volta",
    "BUN_INSTALL": ".bun",
    "DENO_DIR": ".cache/deno",
    "PYENV_ROOT": ".pyenv",
    "ASDF_DATA_DIR": ".asdf",
    "MISE_DATA_DIR": ".local/share/mise",
    "CARGO_HOME": ".cargo",
    "RUSTUP_HOME": ".rustup",
    "PLAYWRIGHT_BROWSERS_PATH": ".cache/ms-playwright",
}
"""Variables with the locations of the user's programs and download caches, relative to the home folder.

Without these variables, `npx` and `uvx` would download a server for every rollout.
"""
_ALWAYS = ("UV_CACHE_DIR", "npm_config_cache")  # set even if the folder does not exist yet
_CODE_SUFFIXES = {
    ".py",
    ".pyz",
    ".js",
    ".mjs",
    ".cjs",
    ".ts",
    ".mts",
    ".sh",
    ".rb",
    ".pl",
    ".php",
    ".lua",
    ".jar",
}
_PYTHON = re.compile(r"python(3(\.\d+)?)?")


def adapt_to_workdir(server: StdioServer, workdir: Workdir) -> StdioServer:
    """Return a copy of the server that starts in the rollout's folder.

    Replace `{workdir}` by the folder's path. A relative path of a program still starts at the current
    directory of Buckeye.
    """
    server = resolve_local_paths(
        StdioServer.model_validate(workdir.expand_workdir(server.model_dump())), workdir.path
    )
    return server.model_copy(
        update={"env": {**_create_environment(workdir), **server.env}, "cwd": server.cwd or str(workdir.path)}
    )


def resolve_local_paths(server: StdioServer, workdir: Path | None = None) -> StdioServer:
    """Return a copy of the server that can start in any folder.

    Relative paths of its program, scripts and Python module become absolute, except paths in `workdir`.
    """
    current = Path.cwd()
    command = str(current / server.command) if "/" in server.command else server.command
    args = [_resolve_argument(argument, current, workdir) for argument in server.args]
    env = {**_module_path(command, args, server.env, current), **server.env}
    cwd = server.cwd and str(current / server.cwd)
    return StdioServer(command=command, args=args, env=env, cwd=cwd)


def find_unreachable_files(server: StdioServer) -> list[str]:
    """Return the relative paths of data files in the arguments, if the files are in the current directory.

    Omit programs and scripts, because `resolve_local_paths` makes their paths absolute.
    """
    if server.cwd is not None:
        return []
    values = [arg.partition("=")[2] if arg.startswith("-") else arg for arg in server.args]
    paths = [Path(value) for value in values if "/" in value or Path(value).suffix]
    existing = [path for path in paths if not path.is_absolute() and os.path.exists(path)]
    return [str(path) for path in existing if not _is_code(path)]


def _create_environment(workdir: Workdir) -> dict[str, str]:
    """Create the rollout's home folder and temporary folder. Return environment variables with their paths.

    The variables also have the locations of the user's programs.
    """
    folders = {name: str(workdir.root / relative) for name, relative in _FOLDERS.items()}
    for folder in folders.values():
        os.makedirs(folder, mode=0o700, exist_ok=True)
    return folders | _user_program_paths()


def _user_program_paths() -> dict[str, str]:
    home = Path.home()
    return {
        name: os.environ.get(name, str(home / relative))
        for name, relative in _USER_PROGRAMS.items()
        if name in os.environ or name in _ALWAYS or (home / relative).is_dir()
    }


def _resolve_argument(argument: str, current: Path, workdir: Path | None) -> str:
    """Return an argument. Make the path of a script absolute, unless the script is in the workdir."""
    path = Path(argument)
    in_workdir = workdir is not None and os.path.exists(workdir / path)
    return str(current / path) if not in_workdir and _is_code(current / path) else argument


def _is_code(path: Path) -> bool:
    """Return True for a file with a suffix of code, or an executable file without a suffix."""
    return os.path.isfile(path) and (
        path.suffix in _CODE_SUFFIXES or (not path.suffix and os.access(path, os.X_OK))
    )


def _module_path(command: str, args: list[str], env: Mapping[str, str], current: Path) -> dict[str, str]:
    """Return the variable PYTHONPATH for `python -m MODULE` if the current directory has this module."""
    if not _PYTHON.fullmatch(Path(command).name) or "-m" not in args[:-1]:
        return {}
    module = args[args.index("-m") + 1].partition(".")[0]
    if not (current / module).is_dir() and not (current / f"{module}.py").is_file():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(current), env.get("PYTHONPATH"))))}
