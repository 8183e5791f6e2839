"""Where keys come from: the environment, `.env` of the project, and `~/.buckeye/.env`, in that order.

Values are looked up when they are used, and handed to who needs them; they are never put into the
environment of this process, which its children would inherit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
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
    "BUCKEYE_API_KEY": "the gateway that MCP environments run behind",
    "HF_TOKEN": "private or licensed models and datasets, and pushing to the Hugging Face hub",
    "WANDB_API_KEY": "metrics in Weights & Biases",
    "PRIME_API_KEY": "renting GPUs",
    "OPENAI_API_KEY": "evaluating models that OpenAI serves",
}
"""The keys that Buckeye itself looks up, and what each is for."""

_OF_PLAYERS = ("HF_TOKEN", "BUCKEYE_API_KEY", "OPENAI_API_KEY")
_OF_MODELS = ("HF_TOKEN", "BUCKEYE_INFERENCE_KEY")

_MARKS = (".git", ".hg", ".svn")
_PLAIN = re.compile(r"[\w.:/+=@%,~-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyState:
    """A key by its name, what it is for, where it was found (None: nowhere), and what may be shown of it."""

    name: str
    purpose: str
    where: str | None
    masked: str | None


def home_folder() -> Path:
    """Where Buckeye keeps what belongs to the user: `~/.buckeye`, or BUCKEYE_HOME."""
    given = os.environ.get(HOME_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".buckeye"


def key_files(folder: Path | None = None) -> list[Path]:
    """The files that may hold keys, the one that wins first: the nearest `.env` from `folder` (default: where
    we are) upward to the root of the project, then that of the user. None of them need be there. Raises
    UsageError for one that somebody else has put where we are."""
    here = (folder or Path()).absolute()
    project = next((path for path in _upward(here) if path.is_file()), here / ENV_FILE)
    if _is_planted(project):
        raise UsageError(
            f"{project} is of another user, in a folder that everybody may write to, and is not read. Go to "
            "a folder of your own"
        )
    return [project, home_folder() / ENV_FILE]


def variables(environ: Mapping[str, str] | None = None, folder: Path | None = None) -> dict[str, str]:
    """All variables that keys and tasks may use: of the environment over those of the files.

    `environ` replaces `os.environ`. Raises UsageError for a file that cannot be read.
    """
    project, own = key_files(folder)
    given = os.environ if environ is None else environ
    return {**read_dotenv(own), **read_dotenv(project), **given}


def key(name: str) -> str:
    """The value of a key, "" where there is none. Raises UsageError for a file that cannot be read."""
    return os.environ.get(name) or variables().get(name, "")


def check_variables(env_name: str, names: Iterable[str]) -> None:
    """Raises UsageError if a variable that an environment is to be given is nowhere."""
    for name in names:
        if not key(name):
            raise UsageError(
                f"environment {env_name} is to be given the variable {name}, which is neither in the "
                f"environment nor in .env. Set it: buckeye auth set {name}"
            )


def child_environment(environ: Mapping[str, str], *, plays: bool) -> dict[str, str]:
    """The variables for a process that we start: without the keys that it has no use for. One that `plays`
    rollouts may need those of tasks and of models that grade, whatever they are called."""
    if plays:
        return {name: value for name, value in environ.items() if name not in KEYS or name in _OF_PLAYERS}
    return {name: value for name, value in environ.items() if not is_secret(name) or name in _OF_MODELS}


def key_states() -> list[KeyState]:
    """Every known key and every other name in the key files, with the place that counts."""
    files = {path: read_dotenv(path) for path in key_files()}
    others = sorted({name for found in files.values() for name in found} - set(KEYS))
    return [_state(name, files) for name in [*KEYS, *others]]


def set_key(name: str, value: str) -> Path:
    """Write a key to the user's own file, which only the user may read, in one step; other lines stay.
    Returns the file. Raises UsageError for a name or value that cannot be written."""
    if not name.isidentifier() or not name.isascii():
        raise UsageError(f"{name} is no name of a variable. Write for example HF_TOKEN")
    if not value or not value.replace("\n", "").isprintable():
        raise UsageError(f"{name}: the value is empty, or has signs in it that cannot be seen")
    path = home_folder() / ENV_FILE
    read_dotenv(path)  # a file that is damaged is not made worse
    lines = path.read_text(encoding="utf-8-sig").splitlines() if path.exists() else []
    line = f"{name}={_written(value)}"
    places = [number for number, there in enumerate(lines) if _name_of(there) == name]
    if places:
        lines[places[0]] = line
        lines = [there for number, there in enumerate(lines) if number not in places[1:]]
    else:
        lines.append(line)
    write_file(path, "\n".join(lines) + "\n", mode=0o600)
    return path


@contextlib.contextmanager
def made_key(name: str, port: int) -> Iterator[str]:
    """A key for one start of a server on a port of this machine, in a file that only this user may read while
    the block runs. `local_key` finds it."""
    value, path = secrets.token_urlsafe(24), made_key_file(name, port)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_file(path, value, mode=0o600)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_EX)  # of a server that was killed it is not
    try:
        yield value
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def key_for(name: str, url: str) -> str:
    """The value of a key for the inference server at `url`, or that which it made for itself; "" where
    neither is."""
    return key(name) or local_key("BUCKEYE_INFERENCE_KEY", url)


def local_key(name: str, url: str) -> str:
    """The key `name` that a server of this user made for itself, "" if none has at that address."""
    with contextlib.suppress(OSError, ValueError):
        parts = urlsplit(url)
        path = made_key_file(name, parts.port or 80)
        if is_loopback(parts.hostname or "") and is_locked(path):
            return read_regular(path, limit=256).decode("ascii")
    return ""


def made_keys() -> Path:
    """The folder of the keys that servers of this user made for themselves."""
    return home_folder() / "servers"


def made_key_file(name: str, port: int) -> Path:
    """Return the file of the key that a server on this port made for one start."""
    return made_keys() / f"{name}-{port}"


def masked(value: str) -> str:
    """The ends of a long value, and nothing of a short one."""
    return f"{value[:3]}…{value[-2:]}" if len(value) >= 16 else "…"


def _upward(folder: Path) -> Iterator[Path]:
    """`.env` of a folder and of those above it: up to the root of a repository, or below the home directory,
    and not into a folder that is another user's or that everybody may write to."""
    home = Path.home()
    yield folder / ENV_FILE
    while not any((folder / mark).exists() for mark in _MARKS):
        above = folder.parent
        if above in (folder, home) or folder == home or not _is_ours(above):
            return
        folder = above
        yield folder / ENV_FILE


def _is_ours(folder: Path) -> bool:
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o002


def _is_planted(file: Path) -> bool:
    if not file.is_file() or not file.parent.stat().st_mode & 0o002:
        return False
    return file.stat().st_uid != os.geteuid()


def _state(name: str, files: Mapping[Path, Mapping[str, str]]) -> KeyState:
    purpose = KEYS.get(name, "used by tasks or programs of yours")
    if os.environ.get(name):
        return KeyState(name, purpose, "environment", masked(os.environ[name]))
    for path, found in files.items():
        if found.get(name):
            return KeyState(name, purpose, str(path), masked(found[name]))
    return KeyState(name, purpose, None, None)


def _name_of(line: str) -> str | None:
    match = LINE.fullmatch(line)
    return match["name"] if match is not None else None


def _written(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
