"""What a server that starts in a rollout's folder finds around it: home, temporary files, and programs."""

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
"""Where programs of the user's are, and what they have fetched: below the home folder, where it is there. A
server that `npx` or `uvx` starts would else be fetched for every rollout."""
_ALWAYS = ("UV_CACHE_DIR", "npm_config_cache")  # also before anything was fetched
_CODE = {".py", ".pyz", ".js", ".mjs", ".cjs", ".ts", ".mts", ".sh", ".rb", ".pl", ".php", ".lua", ".jar"}
_PYTHON = re.compile(r"python(3(\.\d+)?)?")


def started_in(server: StdioServer, workdir: Workdir) -> StdioServer:
    """The server as it is started in the folder. `{workdir}` is replaced; a program that is named by a path
    from where Buckeye was started is still that program."""
    server = from_here(StdioServer.model_validate(workdir.placed(server.model_dump())), workdir.path)
    return server.model_copy(
        update={"env": {**_environment(workdir), **server.env}, "cwd": server.cwd or str(workdir.path)}
    )


def from_here(server: StdioServer, workdir: Path | None = None) -> StdioServer:
    """The server so that it can be started in another folder: its program, and a module of ours, are found
    from where we are; words that are files in `workdir` are meant there."""
    here = Path.cwd()
    command = str(here / server.command) if "/" in server.command else server.command
    args = [_program(word, here, workdir) for word in server.args]
    env = {**_searched(command, args, server.env, here), **server.env}
    cwd = server.cwd and str(here / server.cwd)
    return StdioServer(command=command, args=args, env=env, cwd=cwd)


def left_behind(server: StdioServer) -> list[str]:
    """Words of its command line that name files or folders from where we are, and that it does not find in a
    folder of its own. Its program is none of them."""
    if server.cwd is not None:
        return []
    named = [word.partition("=")[2] if word.startswith("-") else word for word in server.args]
    paths = [Path(word) for word in named if "/" in word or Path(word).suffix]
    here = [path for path in paths if not path.is_absolute() and os.path.exists(path)]
    return [str(path) for path in here if not _is_code(path)]


def _environment(workdir: Workdir) -> dict[str, str]:
    """Folders of the rollout's own, made as they are named, and where the user's programs are."""
    own = {name: str(workdir.place / below) for name, below in _FOLDERS.items()}
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
    """A word of the command line; the whole path of a script that is here and not in the folder."""
    path = Path(word)
    theirs = workdir is not None and os.path.exists(workdir / path)
    return str(here / path) if not theirs and _is_code(here / path) else word


def _is_code(path: Path) -> bool:
    """Whether it is a file that is run: by its name, or as `node_modules/.bin/server`."""
    return os.path.isfile(path) and (path.suffix in _CODE or (not path.suffix and os.access(path, os.X_OK)))


def _searched(command: str, args: list[str], env: Mapping[str, str], here: Path) -> dict[str, str]:
    """With `python -m MODULE` of a module that is here, where Python is to look for it."""
    if not _PYTHON.fullmatch(Path(command).name) or "-m" not in args[:-1]:
        return {}
    module = args[args.index("-m") + 1].partition(".")[0]
    if not (here / module).is_dir() and not (here / f"{module}.py").is_file():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(here), env.get("PYTHONPATH"))))}
