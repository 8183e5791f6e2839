"""Home folder, temporary files and programs of a server that starts in a rollout's folder."""

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
_INSTALLED = {
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
"""Locations of the user's programs and download caches, below the home folder.

Without them, a server that `npx` or `uvx` starts would be downloaded for every rollout.
"""
_ALWAYS = ("UV_CACHE_DIR", "npm_config_cache")  # set even before the first download
_CODE = {".py", ".pyz", ".js", ".mjs", ".cjs", ".ts", ".mts", ".sh", ".rb", ".pl", ".php", ".lua", ".jar"}
_PYTHON = re.compile(r"python(3(\.\d+)?)?")


def adapt_to_workdir(server: StdioServer, workdir: Workdir) -> StdioServer:
    """Return the server as it starts in the rollout's folder.

    `{workdir}` is replaced. A program given as a relative path is still resolved from Buckeye's own
    directory.
    """
    server = resolve_local_paths(
        StdioServer.model_validate(workdir.expand_workdir(server.model_dump())), workdir.path
    )
    return server.model_copy(
        update={"env": {**_environment(workdir), **server.env}, "cwd": server.cwd or str(workdir.path)}
    )


def resolve_local_paths(server: StdioServer, workdir: Path | None = None) -> StdioServer:
    """Return the server for a start in another folder.

    Its program, and a Python module of the user, are resolved from the current directory. Arguments that are
    files in `workdir` refer to those.
    """
    here = Path.cwd()
    command = str(here / server.command) if "/" in server.command else server.command
    args = [_program(word, here, workdir) for word in server.args]
    env = {**_searched(command, args, server.env, here), **server.env}
    cwd = server.cwd and str(here / server.cwd)
    return StdioServer(command=command, args=args, env=env, cwd=cwd)


def find_unreachable_files(server: StdioServer) -> list[str]:
    """Return arguments that name existing relative paths, which the server will not find in another folder.

    Programs and scripts are not included, because they are resolved.
    """
    if server.cwd is not None:
        return []
    named = [word.partition("=")[2] if word.startswith("-") else word for word in server.args]
    paths = [Path(word) for word in named if "/" in word or Path(word).suffix]
    here = [path for path in paths if not path.is_absolute() and os.path.exists(path)]
    return [str(path) for path in here if not _is_code(path)]


def _environment(workdir: Workdir) -> dict[str, str]:
    """Create the rollout's own home and temporary folders, and return the environment variables for them.

    Also includes the locations of the user's programs.
    """
    own = {name: str(workdir.root / below) for name, below in _FOLDERS.items()}
    for folder in own.values():
        os.makedirs(folder, mode=0o700, exist_ok=True)
    return own | _installed()


def _installed() -> dict[str, str]:
    home = Path.home()
    return {
        name: os.environ.get(name, str(home / below))
        for name, below in _INSTALLED.items()
        if name in os.environ or name in _ALWAYS or (home / below).is_dir()
    }


def _program(word: str, here: Path, workdir: Path | None) -> str:
    """Return an argument; a script here that is not in the rollout's folder gets its absolute path."""
    path = Path(word)
    theirs = workdir is not None and os.path.exists(workdir / path)
    return str(here / path) if not theirs and _is_code(here / path) else word


def _is_code(path: Path) -> bool:
    """Return True for a program file: one with a code suffix, or an executable without a suffix."""
    return os.path.isfile(path) and (path.suffix in _CODE or (not path.suffix and os.access(path, os.X_OK)))


def _searched(command: str, args: list[str], env: Mapping[str, str], here: Path) -> dict[str, str]:
    """Return PYTHONPATH for `python -m MODULE` if the module is in the current directory."""
    if not _PYTHON.fullmatch(Path(command).name) or "-m" not in args[:-1]:
        return {}
    module = args[args.index("-m") + 1].partition(".")[0]
    if not (here / module).is_dir() and not (here / f"{module}.py").is_file():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(here), env.get("PYTHONPATH"))))}
