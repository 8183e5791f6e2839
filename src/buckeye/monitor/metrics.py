"""Metrics file `metrics.jsonl`: every process of a run appends one JSON object per event.

`RunMetrics` joins the records by step. All commands that show a run's numbers use it. `Stopwatch` and
`BusyClock` measure the durations in the records.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.disk import write_when_room, write_when_room_async
from buckeye.base.json_lines import LineFile, LineTail, parse_json_lines, read_json_lines
from buckeye.base.process import run_identity

Record = Mapping[str, Any]

RECORD_KEYS = ("time", "attempt", "process", "step")
"""Keys of every record; all other keys are metrics."""

TRAINER_PROCESSES = ("trainer", "sft")
"""Processes that record trained steps."""

_LARGEST = 1e30
_STEP_PROCESSES = (*TRAINER_PROCESSES, "orchestrator")
"""Processes that record completed steps. All other processes record measurements of weights."""


class MetricsLog:
    """Writer of lines to `metrics.jsonl`, which several processes share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = LineFile(path)

    def write(self, process: str, step: int, values: Mapping[str, Any]) -> None:
        """Append `{"time": seconds since the epoch, "attempt": ..., "process": ..., "step": ..., **values}`.

        Raise `DiskFullError` if the disk stays full.
        """
        line, what = self._line(process, step, values)
        write_when_room(self._path, lambda: self._file.append(line), what=what, needed=0)

    async def write_async(self, process: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a record like `write`. While the disk is full, other tasks continue."""
        line, what = self._line(process, step, values)
        await write_when_room_async(self._path, lambda: self._file.append(line), what=what, needed=0)

    def _line(self, process: str, step: int, values: Mapping[str, Any]) -> tuple[bytes, str]:
        head = {"time": round(time.time(), 3), "attempt": run_identity().attempt}
        line = json.dumps({**head, "process": process, "step": step, **values}).encode() + b"\n"
        return line, f"the metrics of {process} step {step}"

    def close(self) -> None:
        self._file.close()


_NOT_METRICS = ("step", "attempt", "time")


class MetricsTail:
    """Reader that follows `metrics.jsonl` from byte `position` on (default: its current end).

    `read_new` returns complete new records, and moves `position` to their end.
    """

    def __init__(self, path: Path, position: int | None = None) -> None:
        self._lines = LineTail(path, position)

    @property
    def position(self) -> int:
        return self._lines.position

    def read_new(self) -> list[Record]:
        """Return the records since the last call.

        Invalid lines, for example of a killed process, are skipped.
        """
        return list(filter(_is_record, parse_json_lines(self._lines.read_new())))


def read_metrics(path: Path) -> Iterator[Record]:
    """Yield the records of a metrics file in order. A missing file has no records."""
    return filter(_is_record, read_json_lines(path))


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Records of step `number` (from 0), by process.

    `orchestrator` records the batch of the step, and `trainer` or `sft` the training on this batch. Other
    processes record measurements of the weights before this training.
    """

    number: int
    records: Mapping[str, Record]

    @property
    def trained(self) -> Record | None:
        """Record of this step's training, or None."""
        return next((self.records[name] for name in TRAINER_PROCESSES if name in self.records), None)

    @property
    def reward(self) -> float | None:
        """Mean reward of the batch."""
        return self.value("orchestrator/reward/mean")

    @property
    def sampled_reward(self) -> float | None:
        """Mean reward of all rollouts sampled for the batch.

        `reward` is the mean of the rollouts that are trained, after filters of groups. If the run has not
        recorded the mean of all rollouts, return `reward`.
        """
        played = self.value("orchestrator/reward/played")
        return self.reward if played is None else played

    def values(self) -> dict[str, float]:
        """Return all numbers by `<process>/<name>`."""
        return {
            f"{process}/{name}": value
            for process in self.records
            for name, value in self.values_of(process).items()
        }

    def values_of(self, process: str) -> dict[str, float]:
        """Return the numbers of a process that has a record, by name."""
        return {
            name: float(value)
            for name, value in self.records[process].items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NOT_METRICS
        }

    def value(self, name: str) -> float | None:
        """Return a metric by `<process>/<name>`, such as `trainer/loss`, or by its name alone.

        Return None if the metric is missing, or if it exceeds 1e30, because sums could overflow.
        """
        process, _, metric = name.partition("/")
        found = self.records[process].get(metric) if process in self.records else None
        records = (
            self.records[process] for process in (*_STEP_PROCESSES, *self.records) if process in self.records
        )
        for given in (found, *(record.get(name) for record in records)):
            if isinstance(given, int | float) and abs(given) <= _LARGEST:
                return float(given)
        return None


class RunMetrics:
    """Records of a run, joined by step.

    A new attempt resumes from a checkpoint and may repeat steps. Records of earlier attempts are invalid if
    their step is at or after the first step of the new attempt. Evaluations at this first step stay valid,
    because they measured the weights that the new attempt resumes with.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._records: dict[tuple[int, str], Record] = {}
        self._began: dict[int, int] = {}
        """First step of each attempt."""
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add a record."""
        step, process, attempt = record["step"], record["process"], _attempt(record)
        if process in _STEP_PROCESSES and step < self._began.get(attempt, math.inf):
            self._began[attempt] = step
            self._records = {k: known for k, known in self._records.items() if not self._is_superseded(known)}
        before = self._records.get((step, process))
        if not self._is_superseded(record) and (before is None or _attempt(before) <= attempt):
            self._records[step, process] = record

    def steps(self) -> list[StepMetrics]:
        """Return all recorded steps, in order."""
        by_step: dict[int, dict[str, Record]] = defaultdict(dict)
        for (step, process), record in self._records.items():
            by_step[step][process] = record
        return [StepMetrics(number, by_step[number]) for number in sorted(by_step)]

    def of(self, process: str) -> dict[int, Record]:
        """Return step -> record of one process, in order."""
        return {step.number: step.records[process] for step in self.steps() if process in step.records}

    def values(self, name: str) -> dict[int, float]:
        """Return step -> value of a metric, in order, for the steps that have it."""
        return {s.number: value for s in self.steps() if (value := s.value(name)) is not None}

    def take(self, *, rest: bool = False) -> list[StepMetrics]:
        """Remove the complete steps, and return them in order.

        A step is complete if its batch and its training are recorded, or if a later step is trained. With
        `rest`, all steps are complete, because the run has ended.
        """
        steps = self.steps()
        newest = max((step.number for step in steps if step.trained is not None), default=-1)
        done = [step for step in steps if rest or step.number < newest or _is_whole(step)]
        for step in done:
            for process in step.records:
                del self._records[step.number, process]
        return done

    def _is_superseded(self, record: Record) -> bool:
        """Return True if a later attempt began at or before the step of this record."""
        last = record["step"] if record["process"] in _STEP_PROCESSES else record["step"] - 1
        return any(attempt > _attempt(record) and first <= last for attempt, first in self._began.items())


def read_run_metrics(path: Path) -> RunMetrics:
    """Return the joined records of a metrics file."""
    return RunMetrics(read_metrics(path))


def _is_whole(step: StepMetrics) -> bool:
    return "sft" in step.records or {"trainer", "orchestrator"} <= step.records.keys()


def _attempt(record: Record) -> int:
    return int(record.get("attempt", 1))


def _is_record(line: Record) -> bool:
    """Return True if a line has the keys of a record. A damaged file may contain other lines."""
    numbers = (line.get("step"), line.get("attempt", 1))
    return isinstance(line.get("process"), str) and all(isinstance(n, int) and n >= 0 for n in numbers)


class Stopwatch:
    """Durations in seconds by cause, between two records.

    Every record has all causes, so that columns of `metrics.jsonl` have no gaps. `idle` is the
    cause that counts as waiting for other processes, if any.
    """

    def __init__(self, *causes: str, idle: str | None = None) -> None:
        self._seconds = dict.fromkeys(causes, 0.0)
        self._idle = idle
        self._since = time.monotonic()

    @contextmanager
    def of(self, cause: str) -> Iterator[None]:
        """Add the block's duration to `cause`, one of the constructor's causes."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[cause] += time.monotonic() - started

    def take(self) -> dict[str, float]:
        """Return the times since the last call, and restart from zero.

        The keys are `time/<cause>`, `time/total` (all elapsed time) and `idle_ratio` (the idle share of it).
        """
        now = time.monotonic()
        values = {f"time/{cause}": seconds for cause, seconds in self._seconds.items()}
        total = values["time/total"] = now - self._since
        if self._idle is not None:
            values["idle_ratio"] = self._seconds[self._idle] / max(total, 1e-9)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._since = now
        return values


class BusyClock:
    """Context manager that measures busy and idle time.

    Enter it for every activity. Activities may overlap.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Busy seconds, up to the end of the last activity."""
        self._under_way = 0
        self._taken = 0.0
        self._busy_since = self._since = time.monotonic()

    def __enter__(self) -> None:
        if self._under_way == 0:
            self._busy_since = time.monotonic()
        self._under_way += 1

    def __exit__(self, *_: object) -> None:
        self._under_way -= 1
        if self._under_way == 0:
            self.seconds += time.monotonic() - self._busy_since

    def take_idle(self) -> float:
        """Return the share of idle time since the last call, from 0 to 1."""
        now = time.monotonic()
        if self._under_way:
            self.seconds += now - self._busy_since
            self._busy_since = now
        total = now - self._since
        idle = 1.0 - (self.seconds - self._taken) / total if total > 0 else 0.0
        self._taken, self._since = self.seconds, now
        return min(1.0, max(0.0, idle))
