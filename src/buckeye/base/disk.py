"""Disk space: a large file is written once there is room for it, else the process ends after a short wait.

A reserve of the file system stays free for small files: logs, metrics, the state of the run.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from buckeye.base.process import stop_requested
from buckeye.base.storage import step_directories
from buckeye.errors import DiskFullError

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_SECONDS = 60.0
"""Maximum wait for disk space. It is shorter than the timeout of collectives, in which other ranks wait."""

_MAX_RESERVE = 256_000_000
_POLL_SECONDS = 2.0
_FEW_FILES = 100  # a checkpoint of many ranks has a few dozen


def write_when_room(path: Path, write: Callable[[], T], *, what: str, needed: int | None = None) -> T:
    """Call `write()`, which writes `path`, once `needed` bytes and the reserve are free.

    Retry it if the disk becomes full in the middle; a failed write must leave nothing behind.

    `needed` None means the size of the newest `step_N` next to `path`; 0 is a small write, which may use the
    reserve. `what` is for messages. Raise `DiskFullError` after `WAIT_SECONDS` without room, or if the
    process received a stop request.
    """
    writer = _Writer(path, write, what, needed)
    while not writer.attempt():
        time.sleep(_POLL_SECONDS)
    return writer.result


async def write_when_room_async(
    path: Path, write: Callable[[], T], *, what: str, needed: int | None = None
) -> T:
    """Run `write_when_room` without blocking the event loop."""
    writer = _Writer(path, write, what, needed)
    while not writer.attempt():
        await asyncio.sleep(_POLL_SECONDS)
    return writer.result


def wait_for_room(path: Path, *, what: str, needed: int) -> None:
    """Wait until `needed` bytes and the reserve are free.

    Raise `DiskFullError` after `WAIT_SECONDS` without room, or if the process received a stop request.
    """
    write_when_room(path, lambda: None, what=what, needed=needed)


class _Writer(Generic[T]):
    """Write operation that is retried until there is room, or the wait is over."""

    result: T

    def __init__(self, path: Path, write: Callable[[], T], what: str, needed: int | None) -> None:
        self._path, self._write, self._what = path, write, what
        self._needed = max(1, size_of_newest_step(path.parent)) if needed is None else needed
        self._deadline: float | None = None

    def attempt(self) -> bool:
        """Write if there is room. Return True if it succeeded. Raise `DiskFullError` if the wait is over."""
        if not self._needed or free_bytes(self._path) >= self._needed + reserve_bytes(self._path):
            try:
                self.result = self._write()
                return True
            except Exception as error:
                if not is_disk_full(error):
                    raise
        self._wait()
        return False

    def _wait(self) -> None:
        now, run = time.monotonic(), _run_directory(self._path)
        message = f"the disk is full: cannot write {self._what}, {self._shortage(run)}"
        if self._deadline is None:
            self._deadline = now + WAIT_SECONDS
            log.warning(
                "%s; waiting up to %.0f s for space; %s", message, WAIT_SECONDS, disk_usage_advice(run)
            )
        if stop_requested() or now >= self._deadline:
            raise DiskFullError(message, hint=f"{disk_usage_advice(run)}; then: rl resume {run}")

    def _shortage(self, run: Path) -> str:
        free = f"{free_space_text(self._path)} free on the file system of {run}"
        if self._needed <= 1:
            return free
        reserve = human_bytes(reserve_bytes(self._path))
        return f"which requires {human_bytes(self._needed)} and a reserve of {reserve}: {free}"


def is_disk_full(error: BaseException) -> bool:
    """Return True if an error means that a disk or a quota is full.

    Libraries not written in Python have their own errors, with the number in the text.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return re.search(rf"\(os error ({errno.ENOSPC}|{errno.EDQUOT})\)", str(error)) is not None


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may use on the file system of `path`, which need not exist."""
    return shutil.disk_usage(_nearest_existing(path)).free


def total_bytes(path: Path) -> int:
    """Return the size in bytes of the file system of `path`, which need not exist."""
    return shutil.disk_usage(_nearest_existing(path)).total


def free_space_text(path: Path) -> str:
    """Return the free space of the file system of `path` as text, such as `12.3 GB`.

    The text includes the number of files if only few can be created.
    """
    counts = os.statvfs(_nearest_existing(path))
    are_few = counts.f_files > 0 and counts.f_favail < _FEW_FILES
    return human_bytes(free_bytes(path)) + (f" and room for {counts.f_favail} more files" if are_few else "")


def reserve_bytes(path: Path) -> int:
    """Return the number of bytes that large files leave free on the file system of `path`.

    This is 1 % of its size, at most 256 MB.
    """
    return min(_MAX_RESERVE, total_bytes(path) // 100)


def disk_usage_advice(run: Path) -> str:
    """Return the largest folders of a run as text, with the command that shows what can be deleted."""
    sizes = sorted(((size_of(path), path.name) for path in run.iterdir() if path.is_dir()), reverse=True)
    largest = ", ".join(f"{name} {human_bytes(size)}" for size, name in sizes[:6] if size)
    return f"list files to delete: rl clean {run} --dry-run (the run has {largest or 'no files'})"


def size_of_newest_step(folder: Path) -> int:
    """Return the size in bytes of the last `step_N` in a folder, or 0."""
    steps = list(step_directories(folder).values())
    return size_of(steps[-1]) if steps else 0


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of all files under a directory.

    Files deleted meanwhile count as 0.
    """
    try:
        if not path.is_dir() or path.is_symlink():
            return path.lstat().st_size
        with os.scandir(path) as entries:
            return sum(size_of(Path(entry.path)) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def human_bytes(count: int | None) -> str:
    """Return a size as text, such as 12.3 GB; "unknown" for None."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"
        value /= 1000
    return f"{value:.1f} TB"


def _run_directory(path: Path) -> Path:
    """Return the run directory of `path`: the nearest parent with a run.json."""
    parents = list(path.absolute().parents)
    return next(
        (folder for folder in parents if (folder / "run.json").exists()), _nearest_existing(parents[0])
    )


def _nearest_existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
