"""Control group (cgroup v2) of a server process, which kills all processes that the server starts.

Servers get a control group if this process may create control groups. A child of a server can leave the
process group, and can clear the environment variable that marks it, but cannot leave the control group.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from pathlib import Path

_PREFIX = "buckeye-server-"
_KILL_SECONDS = 5.0


def create_control_group(pid: int) -> Path | None:
    """Return a new group that contains the process, or None if this process cannot create groups."""
    parent = _parent_group()
    if parent is None:
        return None
    group = parent / f"{_PREFIX}{os.getpid()}-{pid}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        _remove(group)
        return None
    return group


def kill_control_group(group: Path) -> None:
    """Kill all processes in a group, and remove the group."""
    deadline = time.monotonic() + _KILL_SECONDS
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    while not _remove(group) and time.monotonic() < deadline:
        time.sleep(0.01)


@functools.cache
def _parent_group() -> Path | None:
    """Return this process's own group, or None without cgroup v2.

    Also kills leaked groups of Buckeye processes that no longer run.
    """
    with contextlib.suppress(OSError, ValueError, StopIteration):
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        root = next(Path(mount[1]) for mount in mounts if mount[2] == "cgroup2")
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        parent = root / next(line[4:] for line in groups if line.startswith("0::"))
        for leaked in parent.glob(f"{_PREFIX}*"):
            if not Path("/proc", leaked.name.removeprefix(_PREFIX).partition("-")[0]).exists():
                kill_control_group(leaked)
        return parent
    return None


def _remove(group: Path) -> bool:
    with contextlib.suppress(OSError):  # a process of the group still runs
        group.rmdir()
    return not group.exists()
