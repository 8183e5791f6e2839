"""Look up keys in the environment, in `.env` of the project, and in `~/.buckeye/.env`, in this order.

A key is looked up when it is used. Keys from files are not added to `os.environ`, because child processes
would inherit them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from buckeye.base.dotenv import LINE, read_dotenv
from buckeye.base.foreign_files import read_regular
from buckeye.base.process import is_secret
from buckeye.base.request_gate import is_loopback
from buckeye.base.storage import is_locked, write_file
from buckeye.errors import UsageError

ENV_FILE = ".env"
HOME_VARIABLE = "BUCKEYE_HOME"

KEYS = {
    "BUCKEYE_API_KEY": "gateway of MCP environments",
    "HF_TOKEN": "private or gated models and datasets, and uploads to the Hugging Face hub",
    "WANDB_API_KEY": "metrics in Weights & Biases",
    "PRIME_API_KEY": "renting GPUs from Prime Intellect",
    "OPENAI_API_KEY": "evaluating models of OpenAI",
}
"""Keys that Buckeye looks up, and their purposes."""

_ROLLOUT_KEYS = ("HF_TOKEN", "BUCKEYE_API_KEY", "OPENAI_API_KEY")
_MODEL_KEYS = ("HF_TOKEN", "BUCKEYE_INFERENCE_KEY")

_REPOSITORY_FOLDERS = (".git", ".hg", ".svn")
_PLAIN = re.compile(r"[\w.:/+=@%,~-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyState:
    """State of a key, for display. `where` is the source of the value. If no value is found, it is None."""

    name: str
    purpose: str
    where: str | None
    masked: str | None


def home_folder() -> Path:
    """Return the folder of Buckeye in the home directory: BUCKEYE_HOME, or `~/.buckeye`."""
    given = os.environ.get(HOME_VARIABLE)
    return Path(os.path.expanduser(given)) if given else Path.home() / ".buckeye"


def key_files() -> list[Path]:
    """Return the two files that may hold keys, in order of precedence. They need not exist.

    The first is the nearest `.env` in the current folder or a parent folder, up to the root of the project.
    The second is `.env` in `home_folder()`. Raise `UsageError` if another user may have written the first.
    """
    start = Path.cwd()
    project = next((path for path in _project_files(start) if path.is_file()), start / ENV_FILE)
    if _is_planted(project):
        raise UsageError(
            f"{project} belongs to another user, in a folder that everyone can write to",
            code="BK-FILE-PERMISSION",
            hint="change to a folder that only you can write to",
        )
    return [project, home_folder() / ENV_FILE]


def variables() -> dict[str, str]:
    """Return the variables of the environment and of the key files. The environment takes precedence.

    Raise `UsageError` for a file that cannot be read.
    """
    project, own = key_files()
    return {**read_dotenv(own), **read_dotenv(project), **os.environ}


def key(name: str) -> str:
    """Return the value of a key, or "" if it is not set. Raise `UsageError` for an unreadable key file."""
    return os.environ.get(name) or variables().get(name, "")


def check_variables(env_name: str, names: Iterable[str]) -> None:
    """Raise `UsageError` if a variable of `names` is not set. The RL environment `env_name` requires them."""
    for name in names:
        if not key(name):
            raise UsageError(
                f"environment {env_name} requires the variable {name}, which is not set and not in .env",
                code="BK-KEY-MISSING",
                hint=f"set it: buckeye auth set {name}",
            )


def child_environment(environ: Mapping[str, str], *, runs_rollouts: bool) -> dict[str, str]:
    """Return the variables for a child process, without the keys that it does not need.

    If the process runs rollouts, remove only the keys in `KEYS` that rollouts do not use. Keep all other
    variables, because tasks and grading models may use keys with any name.
    """
    if runs_rollouts:
        return {name: value for name, value in environ.items() if name not in KEYS or name in _ROLLOUT_KEYS}
    return {name: value for name, value in environ.items() if not is_secret(name) or name in _MODEL_KEYS}


def key_states() -> list[KeyState]:
    """Return the states of the keys in `KEYS`, and of all other variables in the key files."""
    files = {path: read_dotenv(path) for path in key_files()}
    others = sorted({name for values in files.values() for name in values} - set(KEYS))
    return [_key_state(name, files) for name in [*KEYS, *others]]


def set_key(name: str, value: str) -> Path:
    """Write a key to `.env` in `home_folder()`, keep its other lines, and return the path of the file.

    Only the user can read the file. Raise `UsageError` for an invalid name or value.
    """
    if not name.isidentifier() or not name.isascii():
        hint = "use letters, digits and _, as HF_TOKEN"
        raise UsageError(f"{name!r} is not a variable name", code="BK-CLI-ARGUMENT", hint=hint)
    if not value or not value.replace("\n", "").isprintable():
        message = f"the value of {name} is empty, or has invisible characters"
        raise UsageError(message, code="BK-KEY-INVALID", hint="copy the value again")
    path = home_folder() / ENV_FILE
    read_dotenv(path)  # raises for a damaged file, so that it is not overwritten
    lines = path.read_text(encoding="utf-8-sig").splitlines() if path.exists() else []
    new_line = f"{name}={_quote(value)}"
    indices = [i for i, line in enumerate(lines) if _name_in(line) == name]
    if indices:
        lines[indices[0]] = new_line
        lines = [line for i, line in enumerate(lines) if i not in indices[1:]]
    else:
        lines.append(new_line)
    text = "\n".join(lines) + "\n"
    if sys.platform == "linux" and os.access(path, os.W_OK):
        _rewrite(path, text.encode())
    else:
        write_file(path, text, mode=0o600)
    return path


def make_hideable() -> None:
    """Create missing files for keys in `home_folder()`, because a sandbox hides only files that exist."""
    with contextlib.suppress(OSError):
        generated_keys_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        (home_folder() / ENV_FILE).touch(mode=0o600)


@contextlib.contextmanager
def generated_key(name: str, port: int) -> Iterator[str]:
    """Yield a new key for a server on a local port.

    During the block, a file that only this user can read has the key, so that `local_key` finds it.
    """
    value, path = secrets.token_urlsafe(24), generated_key_file(name, port)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_file(path, value, mode=0o600)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel releases the lock of a killed server
    try:
        yield value
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def key_for(name: str, url: str) -> str:
    """Return the value of a key for the inference server at `url`.

    If the key is not set, return the key that the server generated, or "" without one.
    """
    return key(name) or local_key("BUCKEYE_INFERENCE_KEY", url)


def local_key(name: str, url: str) -> str:
    """Return the key `name` that a server of this user at `url` generated, or "" without such a server."""
    with contextlib.suppress(OSError, ValueError):
        parts = urlsplit(url)
        path = generated_key_file(name, parts.port or 80)
        if is_loopback(parts.hostname or "") and is_locked(path):
            return read_regular(path, limit=256).decode("ascii")
    return ""


def generated_keys_folder() -> Path:
    """Return the folder with the keys that servers of this user generated."""
    return home_folder() / "servers"


def generated_key_file(name: str, port: int) -> Path:
    """Return the path of the file with the key that a server on this port generates."""
    return generated_keys_folder() / f"{name}-{port}"


def masked(value: str) -> str:
    """Return the first and last characters of a value, such as `sk-…3f`, or `…` for a short value."""
    return f"{value[:3]}…{value[-2:]}" if len(value) >= 16 else "…"


def _project_files(folder: Path) -> Iterator[Path]:
    """Yield the path `.env` in a folder and in its parents, up to the root of its repository.

    Stop before the home directory, and before a folder that another user owns or that all users can write to.
    """
    home = Path.home()
    yield folder / ENV_FILE
    while not any((folder / name).exists() for name in _REPOSITORY_FOLDERS):
        parent = folder.parent
        if parent in (folder, home) or folder == home or not _is_private(parent):
            return
        folder = parent
        yield folder / ENV_FILE


def _is_private(folder: Path) -> bool:
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o002


def _is_planted(file: Path) -> bool:
    if not file.is_file() or not file.parent.stat().st_mode & 0o002:
        return False
    return file.stat().st_uid != os.geteuid()


def _key_state(name: str, files: Mapping[Path, Mapping[str, str]]) -> KeyState:
    purpose = KEYS.get(name, "your tasks and programs")
    if os.environ.get(name):
        return KeyState(name, purpose, "environment", masked(os.environ[name]))
    for path, values in files.items():
        if values.get(name):
            return KeyState(name, purpose, str(path), masked(values[name]))
    return KeyState(name, purpose, None, None)


def _rewrite(path: Path, data: bytes) -> None:
    """Replace the content of a file. A new file in its place would be visible in running sandboxes."""
    with path.open("r+b", buffering=0) as file:
        os.fchmod(file.fileno(), 0o600)
        os.posix_fallocate(file.fileno(), 0, len(data))  # a full disk is an error before any change
        file.write(data.ljust(os.fstat(file.fileno()).st_size, b"\n"))
        file.truncate(len(data))
        os.fsync(file.fileno())


def _name_in(line: str) -> str | None:
    match = LINE.fullmatch(line)
    return match["name"] if match is not None else None


def _quote(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
