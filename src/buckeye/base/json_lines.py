"""Append lines to files and read JSON Lines.

A line is written completely or not at all, even if the disk is full or several processes append lines.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from buckeye.base.storage import parse_json, well_formed

_LOCK_SECONDS = 2.0  # if a process is suspended while it writes, others wait for its lock for this time


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file in order. A missing file has no objects.

    Invalid lines are skipped, such as the partial line of a killed process.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from parse_json_lines(file)


def parse_json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines in order. Invalid lines are skipped."""
    for line in lines:
        try:
            value = parse_json(line.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def parse_lenient_json(line: bytes) -> Any:
    """Parse JSON that strict parsers reject. Return None if the line is not JSON.

    Half a surrogate pair and invalid UTF-8 become U+FFFD. Texts may contain control characters.
    """
    try:
        return well_formed(json.loads(line.decode("utf-8-sig", "replace"), strict=False))
    except (ValueError, RecursionError):
        return None


def fix_json(line: bytes) -> bytes:
    """Convert JSON that only `parse_lenient_json` reads to valid JSON. Return other input unchanged."""
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = parse_lenient_json(line)
        return json.dumps(value).encode() if isinstance(value, dict | list) else line
    return line


class LineTail:
    """Reader of lines that are appended to a file after byte `position` (default: its current end)."""

    def __init__(self, path: Path, position: int | None = None) -> None:
        self._path = path
        self.position = position if position is not None else path.stat().st_size if path.exists() else 0

    def read_new(self) -> list[bytes]:
        """Return the complete lines since the last call, and set `position` to the end of these lines."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            self.position = min(self.position, file.seek(0, os.SEEK_END))  # the file may have been replaced
            file.seek(self.position)
            *lines, partial = file.read().split(b"\n")
            self.position = file.tell() - len(partial)
        return lines


class LineFile:
    """File to append lines to. The file is created if it does not exist."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, lines: bytes) -> None:
        """Append one or more lines, each with its newline.

        If the write fails, the file remains unchanged, and `OSError` is raised. If the file ends with the
        partial line of a killed process, write a newline before the lines.
        """
        append_lines(self._fd, lines)

    def close(self) -> None:
        os.close(self._fd)


def texts_in(value: Any, *, without: str = "") -> Iterator[str]:
    """Yield all texts in a JSON value, except keys and the values of the key `without`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        items = [value[key] for key in value if key != without] if isinstance(value, dict) else value
        for item in items:
            yield from texts_in(item, without=without)


def append_lines(descriptor: int, lines: bytes) -> None:
    """Append lines to a file that is open for appending.

    If the write fails, a regular file remains unchanged, and `OSError` is raised. A terminal or a pipe may
    then have a part of the lines.
    """
    if not is_file(descriptor):
        _write_all(descriptor, lines)
        return
    with _lock(descriptor) as is_locked:
        size = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, b"\n" + lines if _ends_with_partial_line(descriptor, size) else lines)
        except OSError:
            if is_locked:  # without the lock, another process may have appended a line
                os.ftruncate(descriptor, size)
            raise


def is_file(descriptor: int) -> bool:
    """Return True if the descriptor is a regular file, and not a terminal or a pipe."""
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


class LineStream(io.TextIOBase):
    """Text stream that writes whole lines to a file, and does not fail on a full disk.

    If the disk is full, lines are dropped. The next written line reports the number of dropped lines. A line
    is written when it is complete, or at `flush`. `descriptor` must be open for appending; `close` does not
    close it.
    """

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._partial = ""
        self._lost_lines = 0
        self._lock = threading.RLock()

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            lines, newline, self._partial = (self._partial + text).rpartition("\n")
            self._write_lines(lines + newline)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            partial, self._partial = self._partial, ""
            self._write_lines(partial)

    def _write_lines(self, text: str) -> None:
        if not text:
            return
        note = f"({self._lost_lines} lines lost: the disk was full)\n" if self._lost_lines else ""
        try:
            append_lines(self._descriptor, (note + text).encode(self.encoding, "backslashreplace"))
            self._lost_lines = 0
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._lost_lines += text.count("\n") or 1


def printable(text: str) -> str:
    r"""Return a text with invisible characters as escapes (`\x1b`), except newlines and tabs.

    Without this, the text of a policy or an environment could control the terminal.
    """
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        written = os.write(descriptor, left)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = left[written:]


def _ends_with_partial_line(descriptor: int, size: int) -> bool:
    if not size:
        return False
    try:
        return os.pread(descriptor, 1, size - 1) != b"\n"
    except OSError:  # the descriptor is open only for writing
        return False


@contextmanager
def _lock(descriptor: int) -> Iterator[bool]:
    """Lock the file while a line is appended.

    Yield False if another process keeps the lock, or if locking is unavailable.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    is_locked = _try_to_lock(descriptor)
    while not is_locked and time.monotonic() < deadline:
        time.sleep(0.01)
        is_locked = _try_to_lock(descriptor)
    try:
        yield is_locked
    finally:
        if is_locked:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
