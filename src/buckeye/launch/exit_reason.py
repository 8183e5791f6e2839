"""The reason why a process of a run ended, as far as this machine shows it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.disk import free_bytes, human_bytes
from buckeye.base.process import EXIT_INTERRUPTED
from buckeye.launch.processes import Child, last_lines

_SHOWN_LINES = 20
_FULL_DISK_BYTES = 16_000_000
_CLOCK = re.compile(r"^\d\d:\d\d:\d\d +")
_ERROR_LINE = re.compile(r"error|exception|cannot|failed", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OomKills:
    """Out-of-memory kills so far, in this process's cgroup and on the machine; None if unreadable."""

    in_cgroup: int | None
    on_machine: int | None

    @classmethod
    def read(cls) -> OomKills:
        """Return the current counts."""
        return cls(_count(_cgroup_file(), "oom_kill"), _count(Path("/proc/vmstat"), "oom_kill"))


def describe_exit(child: Child, code: int) -> str:
    """Return one sentence, such as `Inference 0 was ended by SIGKILL`."""
    if child.kill_reason is not None:
        how = f"{child.kill_reason} and was killed"
    elif code < 0:
        how = f"was ended by {_signal_name(-code)}"
    elif code == EXIT_INTERRUPTED:
        how = "was stopped from outside"
    elif code == 0:
        how = "ended although the run had not"
    else:
        how = f"failed with exit code {code}"
    return f"{child.role.title.capitalize()} {how}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the first and the last has no name
        return f"signal {number}"


def explain_exit(child: Child, code: int, memory: OomKills, output_dir: Path) -> str:
    """Return how a child ended, the probable reason, and its last lines of output.

    `memory` holds the kill counts from before: when the child was started, or at the last diagnosis.
    """
    found = [describe_exit(child, code)]
    if code == -signal.SIGKILL and child.kill_reason is None and child.is_local:
        found.append(_who_killed(child, memory))
    if free_bytes(output_dir) < _FULL_DISK_BYTES:
        found.append(f"the disk of {output_dir} is full")
    lines = last_lines(child.stdout, _SHOWN_LINES)
    shown = "\n".join(f"  | {line}" for line in lines) or "  | (it printed nothing)"
    return f"{'; '.join(found)}. Its last lines ({child.stdout}):\n{shown}"


def find_reported_error(child: Child, code: int) -> str | None:
    """Return the error that the process itself reported, or None if it was killed from outside.

    Equal errors give equal texts.
    """
    if code < 0 or code == EXIT_INTERRUPTED or child.kill_reason is not None:
        return None
    if child.heartbeats.failure is not None:
        return f"{child.role.kind}: {child.heartbeats.failure.message}"
    lines = [line for line in last_lines(child.stdout, _SHOWN_LINES) if line.strip()]
    last = _CLOCK.sub("", lines[-1]) if lines else ""
    return f"{child.role.kind}: {last}" if _ERROR_LINE.search(last) else None


def _who_killed(child: Child, before: OomKills) -> str:
    now = OomKills.read()
    used = f"it last used {human_bytes(child.memory)} of memory" if child.memory else ""
    if _more(before.in_cgroup, now.in_cgroup):
        return _joined(
            "the kernel killed it because memory ran out (the limit of this container or job)", used
        )
    if _more(before.on_machine, now.on_machine):
        return _joined(
            "probably by the kernel because memory ran out: it has just killed a process for that", used
        )
    return _joined("by someone, or by the kernel because memory ran out", used)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _more(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def _count(path: Path | None, name: str) -> int | None:
    """Return the number after `name` in a file of lines `name number`, or None."""
    if path is None:
        return None
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        return None
    return None


def _cgroup_file() -> Path | None:
    """Return the path of `memory.events` of this process's cgroup (version 2), or None."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return Path("/sys/fs/cgroup", line[3:].lstrip("/"), "memory.events")
    except OSError:
        return None
    return None
