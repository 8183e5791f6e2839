"""Find the reason why a process of a run ended: its exit code, its last output, and memory and disk."""

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
    """Counts of out-of-memory kills in the cgroup of this process and on the machine; None if unreadable."""

    in_cgroup: int | None
    on_machine: int | None

    @classmethod
    def read(cls) -> OomKills:
        """Return the current counts."""
        return cls(_count(_cgroup_file()), _count(Path("/proc/vmstat")))


def describe_exit(child: Child, code: int) -> str:
    """Return one sentence, such as `Inference 0 was killed by SIGKILL`."""
    if child.kill_reason is not None:
        predicate = f"{child.kill_reason} and was killed"
    elif code < 0:
        predicate = f"was killed by {_signal_name(-code)}"
    elif code == EXIT_INTERRUPTED:
        predicate = "was interrupted"
    elif code == 0:
        predicate = "ended before the run"
    else:
        predicate = f"failed with exit code {code}"
    return f"{child.role.title.capitalize()} {predicate}"


def exit_error_code(child: Child) -> str:
    """Return the error code for the end of a child: the code that it reported, if any."""
    if child.heartbeats.failure is not None:
        return child.heartbeats.failure.code
    if child.process.lost is not None:
        return "BK-CLUSTER"
    return "BK-RUN-PROCESS" if child.kill_reason is None else "BK-RUN-STALLED"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def explain_exit(child: Child, code: int, earlier: OomKills, output_dir: Path) -> str:
    """Return how a child process ended, the probable reason, and its last lines of output.

    `earlier` holds the counts of kills at the start of the child, or at the previous call.
    """
    parts = [describe_exit(child, code)]
    if code == -signal.SIGKILL and child.kill_reason is None and child.is_local:
        parts.append(_kill_cause(earlier))
        if child.memory:
            parts.append(f"last known memory use: {human_bytes(child.memory)}")
    if free_bytes(output_dir) < _FULL_DISK_BYTES:
        parts.append(f"the disk of {output_dir} is full")
    lines = last_lines(child.stdout, _SHOWN_LINES)
    shown = "\n".join(f"  | {line}" for line in lines) or "  | (no output)"
    return f"{'; '.join(parts)}\nLast lines of {child.stdout}:\n{shown}"


def find_reported_error(child: Child, code: int) -> str | None:
    """Return the error that the process reported before it ended.

    Returns None if a signal ended the process, or if it reported no error. Equal errors give equal texts.
    """
    if code < 0 or code == EXIT_INTERRUPTED or child.kill_reason is not None:
        return None
    if child.heartbeats.failure is not None:
        return f"{child.role.kind}: {child.heartbeats.failure.message}"
    lines = [line for line in last_lines(child.stdout, _SHOWN_LINES) if line.strip()]
    last = _CLOCK.sub("", lines[-1]) if lines else ""
    return f"{child.role.kind}: {last}" if _ERROR_LINE.search(last) else None


def _kill_cause(earlier: OomKills) -> str:
    current = OomKills.read()
    if _has_increased(earlier.in_cgroup, current.in_cgroup):
        return "out of memory: the limit of this container or job was exceeded"
    if _has_increased(earlier.on_machine, current.on_machine):
        return "probably out of memory: the kernel has just killed a process for lack of memory"
    return "sender unknown: a user, or the kernel if memory ran out"


def _has_increased(earlier: int | None, current: int | None) -> bool:
    return earlier is not None and current is not None and current > earlier


def _count(path: Path | None) -> int | None:
    """Return the number of kills in a file with a line `oom_kill NUMBER`, or None."""
    text = _find_in(path, r"^oom_kill (\d+)$")
    return None if text is None else int(text)


def _cgroup_file() -> Path | None:
    """Return the path of `memory.events` of this process's cgroup (version 2), or None."""
    cgroup = _find_in(Path("/proc/self/cgroup"), r"^0::/*(.*)$")
    return None if cgroup is None else Path("/sys/fs/cgroup", cgroup, "memory.events")


def _find_in(path: Path | None, pattern: str) -> str | None:
    try:
        match = re.search(pattern, path.read_text(), re.MULTILINE) if path is not None else None
    except OSError:
        return None
    return match[1] if match else None
