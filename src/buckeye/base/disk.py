"""Room on the disk: what is big is written when there is room for it, and whoever finds the disk full waits.

A wait is told once a minute, with what could be freed, and ends by itself when there is room, when the
process is asked to stop, or after `BUCKEYE_DISK_TIMEOUT` seconds. The last `BUCKEYE_DISK_RESERVE` bytes are
for what is small: logs, metrics, the state of the run.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from buckeye.base import heartbeat
from buckeye.base.process import stop_requested
from buckeye.base.storage import is_locked, step_directories
from buckeye.errors import DiskFullError

log = logging.getLogger(__name__)

T = TypeVar("T")

RESERVE_VARIABLE = "BUCKEYE_DISK_RESERVE"
TIMEOUT_VARIABLE = "BUCKEYE_DISK_TIMEOUT"

_LARGEST_RESERVE = 256_000_000
_TIMEOUT_SECONDS = 86_400.0
_SOME = 1  # byte: of what is written for the first time nobody knows how much it is
_POLL_SECONDS = 0.5
_TELL_SECONDS = 60.0
_LOOKS, _LOOK_SECONDS = 4, 0.001
_FEW_FILES = 100  # a checkpoint of many ranks has some dozens
_TRY_AGAIN_SECONDS = 15.0  # a quota may have been lifted, which no count of free bytes shows


def write_when_room(path: Path, write: Callable[[], T], *, what: str, needed: int | None = None) -> T:
    """Call `write()`, which writes `path`, as soon as `needed` bytes and the reserve are free; again, from
    the beginning, if the disk gets full in the middle. It must leave nothing of a write that fails.

    None for `needed` is what the newest `step_N` beside `path` takes; 0 is something small, which may use the
    reserve. `what` is for messages. Raises DiskFullError if the wait is too long, or the process is to stop.
    """
    return Writing(path, write, what=what, needed=needed).finish()


async def write_when_room_async(
    path: Path, write: Callable[[], T], *, what: str, needed: int | None = None
) -> T:
    """As `write_when_room`; other tasks go on during a wait, which ends if this one is cancelled."""
    return await Writing(path, write, what=what, needed=needed).finish_async()


def disk_is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or somebody's share of it, is full. Libraries that are not written
    in Python have errors of their own, with the number in their text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return re.search(rf"\(os error ({errno.ENOSPC}|{errno.EDQUOT})\)", str(error)) is not None


def free_bytes(path: Path) -> int:
    """Free bytes, for this user, of the file system that `path` is, or will be, on."""
    return shutil.disk_usage(_existing(path)).free


def total_bytes(path: Path) -> int:
    """All bytes of the file system that `path` is, or will be, on."""
    return shutil.disk_usage(_existing(path)).total


def what_is_free(path: Path) -> str:
    """`12.3 GB`, and how many files where only few can be made; of the file system of `path`."""
    counts = os.statvfs(_existing(path))
    few = counts.f_files > 0 and counts.f_favail < _FEW_FILES
    return human_bytes(free_bytes(path)) + (f" and room for {counts.f_favail} more files" if few else "")


def reserve_bytes(path: Path, setting: int | None = None) -> int:
    """Bytes that big files leave free on the file system of `path`: the setting, else `BUCKEYE_DISK_RESERVE`,
    else 1 % of it, at most 256 MB."""
    if setting is not None:
        return setting
    given = os.environ.get(RESERVE_VARIABLE)
    return int(given) if given else min(_LARGEST_RESERVE, total_bytes(path) // 100)


def waits_for_disk(output_dir: Path) -> bool:
    """Whether a process of the run in `output_dir` waits for disk space. Who waits for that process meanwhile
    should not count the time."""
    looks = 0
    while is_locked(output_dir, shared=True):
        looks += 1
        if looks == _LOOKS:
            return True
        time.sleep(_LOOK_SECONDS)  # it may be somebody who looks, too: that takes some microseconds
    return False


class Patience:
    """Seconds that somebody may wait for another process of the run in `output_dir`. They do not pass while
    one of its processes waits for disk space."""

    def __init__(self, seconds: float, output_dir: Path) -> None:
        self._left = seconds
        self._output_dir = output_dir
        self._looked = time.monotonic()

    def is_over(self) -> bool:
        """Whether they have passed. To be asked often: at least every few seconds."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        if self._left > 0 and not waits_for_disk(self._output_dir):
            self._left -= passed
        return self._left <= 0


class Writing(Generic[T]):
    """Something that is to be written as `write_when_room` says, in a loop of one's own: a context in which
    `attempt` is called until it says that it is done."""

    result: T

    def __init__(self, path: Path, write: Callable[[], T], *, what: str, needed: int | None) -> None:
        self._path, self._write, self._what = path, write, what
        self._needed = max(_SOME, size_of_newest_step(path.parent)) if needed is None else needed
        self._began: float | None = None
        self._told = 0.0
        self._failed: tuple[float, int] | None = None  # when it last failed, and how much was free then
        self._lock: int | None = None

    def __enter__(self) -> Writing[T]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def finish(self) -> T:
        """Write, however long it takes. Raises DiskFullError if that is too long, or the process is to
        stop."""
        with self:
            while not self.attempt():
                if stop_requested():
                    raise self.stopped()
                time.sleep(_POLL_SECONDS)
        return self.result

    async def finish_async(self) -> T:
        """The same, while other tasks go on."""
        with self:
            while not self.attempt():
                await asyncio.sleep(_POLL_SECONDS)
        return self.result

    def attempt(self) -> bool:
        """Write if there is room. True when it is done."""
        if self._there_is_room():
            try:
                self.result = self._write()
            except Exception as error:
                if not disk_is_full(error):
                    raise
                self._failed = (time.monotonic(), free_bytes(self._path))
            else:
                if self._began is not None:
                    waited = time.monotonic() - self._began
                    heartbeat.report(f"has written {self._what}")
                    log.info("There is disk space again: %s was written after %.0f s", self._what, waited)
                return True
        self._wait()
        return False

    def stopped(self) -> DiskFullError:
        """What to raise if the wait is ended from outside."""
        return DiskFullError(f"Asked to stop while waiting for disk space: {self._what} was not written.")

    def _there_is_room(self) -> bool:
        free = free_bytes(self._path)
        if self._needed and free < self._needed + reserve_bytes(self._path):
            return False
        if self._failed is None:
            return True
        when, free_then = self._failed
        return free > free_then or time.monotonic() > when + _TRY_AGAIN_SECONDS

    def _wait(self) -> None:
        now = time.monotonic()
        run = _run_of(self._path)
        if self._began is None:
            self._began = now
            self._told = now - _TELL_SECONDS
        if self._lock is None:
            self._lock = _hold(run)
        heartbeat.report(f"space for {self._what}", on="disk")
        limit = float(os.environ.get(TIMEOUT_VARIABLE) or _TIMEOUT_SECONDS)
        if now > self._began + limit:
            raise DiskFullError(f"{self._shortage(run)} Nothing was freed for {limit:.0f} s (disk.timeout).")
        if now >= self._told + _TELL_SECONDS:
            self._told = now
            log.warning("%s It goes on by itself when there is room. %s", self._shortage(run), advice(run))

    def _shortage(self, run: Path) -> str:
        free = what_is_free(self._path)
        if self._needed <= _SOME:
            return (
                f"Waiting for disk space to write {self._what}: {free} are free on the file system of {run}."
            )
        needed, kept = human_bytes(self._needed), human_bytes(reserve_bytes(self._path))
        return (
            f"Waiting for disk space to write {self._what}: it takes {needed}, {kept} are kept in reserve, "
            f"and {free} are free on the file system of {run}."
        )


def advice(run: Path) -> str:
    """What the directory of a run holds, and how to see what can go."""
    sizes = sorted(((size_of(path), path.name) for path in run.iterdir() if path.is_dir()), reverse=True)
    largest = ", ".join(f"{name} {human_bytes(size)}" for size, name in sizes[:6] if size)
    return f"The run holds {largest or 'nothing'}; see what can go: rl clean {run} --dry-run"


def _run_of(path: Path) -> Path:
    """The directory of the run that `path` is written for: the nearest above it that says so."""
    above = list(path.absolute().parents)
    return next((folder for folder in above if (folder / "run.json").exists()), _existing(above[0]))


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _hold(run: Path) -> int | None:
    """Let others see, for as long as the descriptor is open, that someone waits. No file could be written."""
    try:
        handle = os.open(run, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # a file system without locks (the others just do not know), or somebody looks just now
        os.close(handle)
        return None
    return handle


def size_of_newest_step(folder: Path) -> int:
    """Bytes of the last `step_N` in a folder; 0 without one."""
    steps = list(step_directories(folder).values())
    return size_of(steps[-1]) if steps else 0


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files under a directory; what goes away meanwhile counts for nothing."""
    try:
        if not path.is_dir() or path.is_symlink():
            return path.lstat().st_size
        with os.scandir(path) as entries:
            return sum(size_of(Path(entry.path)) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def human_bytes(count: int | None) -> str:
    """12.3 GB; "unknown" for None."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"
        value /= 1000
    return f"{value:.1f} TB"
