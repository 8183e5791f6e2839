"""The reason why a process of a run ended: its exit code, memory kills, a full disk, and its last output."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from buckeye.base.disk import free_bytes, human_bytes
from buckeye.base.process import EXIT_INTERRUPTED
from buckeye.launch.processes import Child, last_lines

_SHOWN_LINES = 20
_FULL_DISK_BYTES = 16_000_000
_CLOCK = re.compile(r"^\d\d:\d\d:\d\d +")
_ERROR_LINE = re.compile(r"error|exception|cannot|failed", re.IGNORECASE)


def count_oom_kills() -> int | None:
    """Return the number of out-of-memory kills on this machine and in its containers, or None if unknown."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match is not None else None


def describe_exit(child: Child, code: int) -> str:
    """Return a sentence about the end of a child, such as `Inference 0 was killed by SIGKILL`."""
    if child.kill_reason is not None:
        predicate = f"{child.kill_reason} and was killed"
    elif code < 0:
        predicate = f"was killed by {_signal_name(-code)}"
    elif code == EXIT_INTERRUPTED:
        predicate = "was interrupted"
    elif code == 0:
        predicate = "ended with exit code 0 before the run finished"
    else:
        predicate = f"failed with exit code {code}"
    return f"{child.role.title.capitalize()} {predicate}"


def exit_error_code(child: Child) -> str:
    """Return the error code for the end of a child: the code that it reported, else a general one."""
    if child.heartbeats.failure is not None:
        return child.heartbeats.failure.code
    if child.process.lost is not None:
        return "BK-CLUSTER"
    return "BK-RUN-PROCESS" if child.kill_reason is None else "BK-RUN-STALLED"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the first and the last has no name
        return f"signal {number}"


def explain_exit(child: Child, code: int, earlier: int | None, output_dir: Path) -> str:
    """Return how a child ended, the probable reason, and its last lines of output.

    `earlier` is an earlier result of `count_oom_kills`, from the start or from the last restart.
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
    return f"{'; '.join(parts)}. Last lines of {child.stdout}:\n{shown}"


def find_reported_error(child: Child, code: int) -> str | None:
    """Return the error that the process itself reported, or None if it was killed from outside.

    The text has neither a time nor the number of the process, so that repeated errors have equal texts.
    """
    if code < 0 or code == EXIT_INTERRUPTED or child.kill_reason is not None:
        return None
    if child.heartbeats.failure is not None:
        return f"{child.role.kind}: {child.heartbeats.failure.message}"
    lines = [line for line in last_lines(child.stdout, _SHOWN_LINES) if line.strip()]
    last = _CLOCK.sub("", lines[-1]) if lines else ""
    return f"{child.role.kind}: {last}" if _ERROR_LINE.search(last) else None


def _kill_cause(earlier: int | None) -> str:
    current = count_oom_kills()
    if earlier is not None and current is not None and current > earlier:
        return "probably out of memory: the kernel has just killed a process for lack of memory"
    return "sender unknown: a user, or the kernel if memory ran out"
