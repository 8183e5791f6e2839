"""A control group (version 2) for a server and all that it starts, where this process may make one. Unlike a
process group, and a mark in the environment, it is left by nothing that a program does."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from pathlib import Path

_NAME = "buckeye-server-"
_END_SECONDS = 5.0


def group_of(pid: int) -> Path | None:
    """A new group with this process in it; None where none can be made."""
    above = _above()
    if above is None:
        return None
    group = above / f"{_NAME}{os.getpid()}-{pid}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        _remove(group)
        return None
    return group


def end_group(group: Path) -> None:
    """Kill all that is in a group, and remove it."""
    deadline = time.monotonic() + _END_SECONDS
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    while not _remove(group) and time.monotonic() < deadline:
        time.sleep(0.01)


@functools.cache
def _above() -> Path | None:
    """Our own group, where it has what it takes. Groups of processes that are no more are ended."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        root = next(Path(mount[1]) for mount in mounts if mount[2] == "cgroup2")
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        above = root / next(line[4:] for line in groups if line.startswith("0::"))
        for left in above.glob(f"{_NAME}*"):
            if not Path("/proc", left.name.removeprefix(_NAME).partition("-")[0]).exists():
                end_group(left)
        return above
    return None


def _remove(group: Path) -> bool:
    with contextlib.suppress(OSError):  # something in it still ends
        group.rmdir()
    return not group.exists()
