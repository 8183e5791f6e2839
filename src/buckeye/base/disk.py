"""Write large files only if the disk has enough free space. If the disk is full, wait up to a minute.

Large files leave a reserve free, for small files: logs, metrics, and the state of the run.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from buckeye.base.columns import quoted
from buckeye.base.process import stop_requested
from buckeye.base.storage import step_directories
from buckeye.errors import DiskFullError

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_SECONDS = 60.0
"""Maximum wait for disk space. Other ranks wait in a collective operation, whose timeout is longer."""

_MAX_RESERVE = 256_000_000
_POLL_SECONDS = 2.0
_WRITING_THREAD = ThreadPoolExecutor(1, thread_name_prefix="writer")
_FEW_FILES = 100  # a checkpoint of many ranks has a few dozen files


def write_when_room(path: Path, write: Callable[[], T], *, what: str, needed: int | None = None) -> T:
    """Wait until `needed` bytes and the reserve are free, call `write()`, and return its result.

    `write` writes `path`. It is called again if the disk becomes full while it writes, so it must delete its
    files if it fails. If `needed` is None, the size of the newest `step_N` next to `path` is needed. If it is
    0, the write is small and may use the reserve. `what` names the content in messages. Raise `DiskFullError`
    if the space is not free within `WAIT_SECONDS`, or if the process received a stop request.
    """
    writer = _Writer(path, write, what, needed)
    while not writer.attempt():
        time.sleep(_POLL_SECONDS)
    return writer.result


async def write_when_room_async(
    path: Path, write: Callable[[], T], *, what: str, needed: int | None = None
) -> T:
    """Do the work of `write_when_room` in a thread, so that the event loop continues.

    One thread does all such writes, in order.
    """
    writer, loop = _Writer(path, write, what, needed), asyncio.get_running_loop()
    while not await loop.run_in_executor(_WRITING_THREAD, writer.attempt):
        await asyncio.sleep(_POLL_SECONDS)
    return writer.result


def wait_for_room(path: Path, *, what: str, needed: int) -> None:
    """Wait until `needed` bytes and the reserve are free.

    Raise `DiskFullError` if the space is not free within `WAIT_SECONDS`, or if the process received a stop
    request.
    """
    write_when_room(path, lambda: None, what=what, needed=needed)


class _Writer(Generic[T]):
    """Write operation that is retried until the disk has enough free space, or until a timeout."""

    result: T

    def __init__(self, path: Path, write: Callable[[], T], what: str, needed: int | None) -> None:
        self._path, self._write, self._what = path, write, what
        self._needed = max(1, size_of_newest_step(path.parent)) if needed is None else needed
        self._deadline: float | None = None

    def attempt(self) -> bool:
        """Write if the disk has enough free space, and return True if the write succeeded.

        Raise `DiskFullError` after the timeout.
        """
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
            raise DiskFullError(message, hint=f"{disk_usage_advice(run)}; then: rl resume {quoted(run)}")

    def _shortage(self, run: Path) -> str:
        free = f"{free_space_text(self._path)} free on the file system of {run}"
        if self._needed <= 1:
            return free
        reserve = human_bytes(reserve_bytes(self._path))
        return f"which requires {human_bytes(self._needed)} and a reserve of {reserve}: {free}"


def is_disk_full(error: BaseException) -> bool:
    """Return True if an error means that a disk or a quota is full.

    Libraries written in Rust raise their own errors, with the error number in the text.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return re.search(rf"\(os error ({errno.ENOSPC}|{errno.EDQUOT})\)", str(error)) is not None


def free_bytes(path: Path) -> int:
    """Return the free bytes for this user on the file system of `path`. `path` need not exist."""
    return shutil.disk_usage(_nearest_existing(path)).free


def total_bytes(path: Path) -> int:
    """Return the size in bytes of the file system of `path`. `path` need not exist."""
    return shutil.disk_usage(_nearest_existing(path)).total


def free_space_text(path: Path) -> str:
    """Return the free space of the file system of `path` as text, such as `12.3 GB`.

    If the file system has room for fewer than 100 new files, the text includes their number.
    """
    counts = os.statvfs(_nearest_existing(path))
    are_few = counts.f_files > 0 and counts.f_favail < _FEW_FILES
    return human_bytes(free_bytes(path)) + (f" and room for {counts.f_favail} more files" if are_few else "")


def reserve_bytes(path: Path) -> int:
    """Return the number of bytes that large files leave free on the file system of `path`.

    This is 1 % of the size of the file system, and at most 256 MB.
    """
    return min(_MAX_RESERVE, total_bytes(path) // 100)


def disk_usage_advice(run: Path) -> str:
    """Return a text with the largest folders of a run, and the command that lists files to delete."""
    sizes = sorted(((size_of(path), path.name) for path in run.iterdir() if path.is_dir()), reverse=True)
    largest = ", ".join(f"{name} {human_bytes(size)}" for size, name in sizes[:6] if size)
    return f"list files to delete: rl clean {quoted(run)} --dry-run (the run has {largest or 'no files'})"


def size_of_newest_step(folder: Path) -> int:
    """Return the size in bytes of the directory `step_N` with the highest N in a folder, or 0."""
    steps = list(step_directories(folder).values())
    return size_of(steps[-1]) if steps else 0


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of all files under a directory.

    Files that are deleted during the call count as 0.
    """
    try:
        if not path.is_dir() or path.is_symlink():
            return path.lstat().st_size
        with os.scandir(path) as entries:
            return sum(size_of(Path(entry.path)) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def human_bytes(count: int | None) -> str:
    """Return a size in bytes as text, such as `12.3 GB`, or "unknown" for None."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"
        value /= 1000
    return f"{value:.1f} TB"


def _run_directory(path: Path) -> Path:
    """Return the run directory of `path`: the nearest parent folder with a file `run.json`."""
    parents = list(path.absolute().parents)
    return next(
        (folder for folder in parents if (folder / "run.json").exists()), _nearest_existing(parents[0])
    )


def _nearest_existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
