"""One set-up of logging for every process: `HH:MM:SS    LEVEL message`, to stdout and to the run's log file,
without keys."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from buckeye.base.json_lines import LineStream, is_file
from buckeye.base.keys import variables
from buckeye.base.satellites import SATELLITES
from buckeye.errors import UsageError

# Printing to someone who may go away (a closed terminal, a reader of a pipe that has ended).

log = logging.getLogger(__name__)


class Console:
    """A text stream that is silent from the moment on when nobody can read it any more. In all else it is the
    stream that it is made of."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._be_silent(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._be_silent(error)

    def _be_silent(self, error: OSError) -> None:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, self._stream.fileno())
        os.close(silence)
        with suppress(OSError):
            self._stream.flush()  # what could not be written
        log.warning("Nobody reads what is printed any more (%s): this goes on without", error.strerror)


def print_on_without_readers() -> None:
    """Let this process go on when the terminal or the pipe that it prints to is closed. A stream that
    somebody has put in place of the original one is left alone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__") and not is_file(stream.fileno()):
            setattr(sys, name, Console(stream))


# One set-up of logging for every process: `HH:MM:SS    LEVEL message`, to stdout and to the run's log
# file.

SUCCESS = 25
"""Between INFO and WARNING: something the user waits for has happened."""

_COLOURS = {"DEBUG": "\x1b[2m", "SUCCESS": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m"}


class _Formatter(logging.Formatter):
    def __init__(self, *, colour: bool) -> None:
        super().__init__("%(asctime)s %(levelname)7s %(message)s", datefmt="%H:%M:%S")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        code = _COLOURS.get(record.levelname) if self._colour else None
        return f"{code}{line}\x1b[0m" if code else line


def setup_logging(level: str, process: str, log_file: Path | None) -> None:
    """Send Buckeye's log lines to stdout (coloured on a terminal only) and, if given, to a file.

    All processes of a run append to the same file, whole lines at a time, each under its name.
    """
    logging.addLevelName(SUCCESS, "SUCCESS")
    roots = [logging.getLogger(module) for module in ("buckeye", *SATELLITES)]
    former = {handler for root in roots for handler in root.handlers}
    for root in roots:
        root.handlers.clear()
    for handler in former:
        handler.close()
    _survive_full_disks()
    print_on_without_readers()
    stream = logging.StreamHandler(sys.stdout)
    stream.setFormatter(_Formatter(colour=sys.stdout.isatty()))
    handlers: list[logging.Handler] = [stream]
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        to_file = _FileHandler(log_file)
        to_file.setFormatter(logging.Formatter(f"%(asctime)s [{process}] %(levelname)7s %(message)s"))
        handlers.append(to_file)
    for root in roots:
        root.setLevel("WARNING" if level == "warn" else level.upper())
        root.propagate = False
        root.handlers[:] = handlers


class _FileHandler(logging.StreamHandler[LineStream]):
    """Appends whole lines to a file that other processes append to as well."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        super().__init__(LineStream(self._descriptor))

    def close(self) -> None:
        super().close()
        if self._descriptor >= 0:  # several loggers have it, and each may close it
            os.close(self._descriptor)
            self._descriptor = -1


def _survive_full_disks() -> None:
    """Where this process prints to a file, print whole lines, and lose them rather than end if the disk is
    full. A stream that somebody has put in place of the original one is left alone."""
    streams: dict[tuple[int, int], LineStream] = {}  # one a file: stderr is often where stdout is
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__") and is_file(stream.fileno()):
            stream.flush()
            file = os.fstat(stream.fileno())
            streams.setdefault((file.st_dev, file.st_ino), LineStream(stream.fileno()))
            setattr(sys, name, streams[file.st_dev, file.st_ino])


def run_log(output_dir: Path) -> Path:
    """The one log file of a run, shared by its processes."""
    return output_dir / "logs" / "run.log"


REDACTED = "(redacted)"

_SECRET_NAME = re.compile(
    r"(^|[_\-.])(key|api_?keys?|token|(access|api|auth|refresh)_?tokens|secrets?|passwords?|passwd|pwd|"
    r"credentials?|headers?|auth|authorization|bearer|cookies?)$",
    re.I,
)
_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # of openaiApiKey, APIKey
_QUERY = re.compile(r"(?<=[?&;])([\w.\-]+)=([^&;#\s]+)")
_SECRET_OF_A_QUERY = re.compile(r"(^|[_\-.])sig(nature)?$", re.I)
_BEARER = re.compile(r"\b(Bearer\s+)[\w.~+/=\-]{8,}", re.I)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$")
_SECRET_VALUE = re.compile(r"\b(sk|hf|pit|ghp|gho|github_pat|xox[a-z]|AKIA)[-_]?[A-Za-z0-9_\-]{16,}")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_SHORTEST_SECRET = 8


def redacted(settings: Any) -> Any:
    """A copy of JSON-like settings in which secrets are replaced by `(redacted)`.

    Secret is what a name says (`api_key`, `openaiApiKey`, `token`, `headers`; not a number such as
    `max_tokens`), what is the value of an environment variable with such a name, what looks like a known kind
    of key, and what follows `Bearer`; of an address, the login, and values of its query with such names.
    """
    return _redacted(settings, _values_of_secret_variables())


def _redacted(value: Any, known: frozenset[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _hidden(item) if _is_secret(str(name)) else _redacted(item, known)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(item, known) for item in value]
    if isinstance(value, str):
        return _without_secrets(value, known)
    return value


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(_WORD_BOUNDARY.sub("_", name)) is not None


def _hidden(value: Any) -> Any:
    """Text is hidden, and what a mapping or list holds; no secret is a number, a truth value, or empty."""
    if isinstance(value, Mapping):
        return {name: _hidden(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    return REDACTED if isinstance(value, str) and value else value


def _without_secrets(text: str, known: frozenset[str]) -> str:
    for secret in known:
        text = text.replace(secret, REDACTED)
    text = _BEARER.sub(rf"\g<1>{REDACTED}", _SECRET_VALUE.sub(REDACTED, text))
    return _LOGIN.sub(f"{REDACTED}@", _QUERY.sub(_query_without_secret, text))


def _query_without_secret(pair: re.Match[str]) -> str:
    name = pair[1]
    return f"{name}={REDACTED}" if _is_secret(name) or _SECRET_OF_A_QUERY.search(name) else pair[0]


def _values_of_secret_variables() -> frozenset[str]:
    """The values of keys, from wherever they are read."""
    try:
        known: Mapping[str, str] = variables()
    except UsageError:  # a damaged file gives no key to anyone
        known = os.environ
    return frozenset(
        value
        for name, value in known.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST_SECRET
    )
