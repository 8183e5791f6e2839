"""In-memory file system that is small enough to fill; skips the test if it cannot be mounted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_CHUNK = 65_536


@contextmanager
def small_disk(path: Path, *, size: int, files: int = 0) -> Iterator[Path]:
    """Mount a tmpfs of `size` bytes at `path`, with room for `files` files and directories (0: no limit)."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={files}", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small disk ({error}); be root, or begin with `unshare -rm`")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path, *, leave: int = 0, into: str = "ballast") -> Path:
    """Fill a disk except for `leave` bytes (rounded down to whole pages); return the file.

    Other processes may write at the same time.
    """
    ballast = disk / into
    ballast.parent.mkdir(parents=True, exist_ok=True)
    with ballast.open("ab") as file, suppress(OSError):
        while (spare := _free(disk) - leave) > 0 or not leave:
            os.write(file.fileno(), b"x" * (min(spare, _CHUNK) if leave else _CHUNK))
    return ballast


def _free(disk: Path) -> int:
    state = os.statvfs(disk)
    return state.f_bavail * state.f_frsize
