"""Resources that worker processes use, and leaks of them."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Literal

import psutil

from buckeye.workers.environment import WorkerEnvironment
from buckeye.workers.errors import BoundaryError

Verdict = Literal["pass", "warn", "fail", "not run"]

ROUNDS = 10
_TOO_FEW = f"fewer than {ROUNDS} rounds of sessions (raise --budget and --sessions)"
_WARM_UP = 3
_STEADY = 0.9
"""Share of the pairs of rounds in which a leak grows. Noise grows in half of them."""
_LEAKS: Mapping[str, tuple[float, float, str]] = {
    "memory": (40.0, 1000.0, "kB"),
    "open files": (0.05, 2.0, "files"),
    "threads": (0.05, 2.0, "threads"),
    "child processes": (0.05, 2.0, "processes"),
    "asyncio tasks": (0.05, 2.0, "tasks"),
    "temporary files": (0.05, 2.0, "files"),
}
"""Of each resource: the growth per session and in total that is a leak, and the unit."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Check of a certificate: a verdict, the measured numbers, and one line of detail."""

    name: str
    verdict: Verdict
    detail: str
    measured: Mapping[str, float] = field(default_factory=dict)


async def measure_resources(environment: WorkerEnvironment, temporary: Path) -> dict[str, float]:
    """Return memory, files, threads, processes and asyncio tasks of the workers and their children."""
    totals = dict.fromkeys(_LEAKS, 0.0)
    for process in _processes(environment):
        totals["child processes"] += 1  # also one that has ended, but was not waited for
        with suppress(psutil.Error):
            totals["memory"] += process.memory_info().rss / 1000
            totals["open files"] += process.num_fds()
            totals["threads"] += process.num_threads()
    with suppress(BoundaryError):
        totals["asyncio tasks"] = await environment.asyncio_tasks()
    totals["temporary files"] = sum(len(files) for _, _, files in os.walk(temporary))
    return totals


def find_leaks(rounds: Sequence[Mapping[str, float]], at_once: int) -> Iterator[Measurement]:
    """Yield one check per resource, from the resources after each round of `at_once` sessions.

    A leak grows steadily, in nearly all pairs of the last rounds. Its growth per session is the median of the
    slopes. The memory of a process without a leak also grows in its first rounds.
    """
    for name, (limit, least, unit) in _LEAKS.items():
        values = [resources[name] for resources in rounds[_WARM_UP - ROUNDS :]]
        if len(rounds) < ROUNDS:
            yield Measurement(f"leak of {name}", "not run", _TOO_FEW)
            continue
        slopes = [(values[j] - values[i]) / (j - i) for i, j in combinations(range(len(values)), 2)]
        growth = statistics.median(slopes) / at_once
        is_steady = sum(slope > 0 for slope in slopes) >= _STEADY * len(slopes)
        leaks = is_steady and growth >= limit and values[-1] - values[0] >= least
        detail = f"{growth:.3g} {unit} per session, {values[-1]:,.0f} {unit} at the end"
        measured = {"per_session": rounded(growth), "at_end": rounded(values[-1])}
        yield Measurement(f"leak of {name}", "fail" if leaks else "pass", detail, measured)


def processor_seconds(environment: WorkerEnvironment) -> float:
    """Return the processor time of the workers, including that of their ended children."""
    total = 0.0
    for process in _processes(environment):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def waiting_seconds(environment: WorkerEnvironment) -> float:
    """Return the time that the workers and this process waited for a processor that other programs used."""
    total = 0.0
    for pid in ("self", *(str(process.pid) for process in _processes(environment))):
        with suppress(OSError, ValueError, IndexError):  # not on every kernel
            total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return total


@contextmanager
def separate_temporary_folder() -> Iterator[Path]:
    """Let workers that start in the block use a separate folder for temporary files."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="buckeye-certify-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before


def rounded(value: float) -> float:
    """Return the value with three significant digits."""
    return float(f"{value:.3g}")


def _processes(environment: WorkerEnvironment) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for pid in environment.workers():
        with suppress(psutil.Error):
            leader = psutil.Process(pid)
            found += [leader, *leader.children(recursive=True)]
    return found
