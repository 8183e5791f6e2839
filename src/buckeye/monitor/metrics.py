"""`metrics.jsonl`: every process of a run appends one JSON object per event to the same file.

`RunMetrics` joins them by step. Whatever shows numbers of a run takes them from there. `Stopwatch` and
`BusyClock` measure the seconds in it.
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
from buckeye.base.json_lines import LineFile, parse_json_lines, read_json_lines
from buckeye.base.process import run_identity

Record = Mapping[str, Any]

HEAD = ("time", "attempt", "process", "step")
"""What every record has; the rest are its numbers."""

TRAINERS = ("trainer", "sft")
"""Who records that a step was trained."""

_LARGEST = 1e30
_OF_BATCHES = (*TRAINERS, "orchestrator")
"""Who records that a step was done. The others record measurements of the weights before it."""


class MetricsLog:
    """Appends lines to `metrics.jsonl`, which several processes share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = LineFile(path)

    def write(self, process: str, step: int, values: Mapping[str, Any]) -> None:
        """Append `{"time": seconds since the epoch, "attempt": ..., "process": ..., "step": ..., **values}`.
        Raises DiskFullError as `write_when_room` does."""
        line, what = self._line(process, step, values)
        write_when_room(self._path, lambda: self._file.append(line), what=what, needed=0)

    async def write_async(self, process: str, step: int, values: Mapping[str, Any]) -> None:
        """Do as `write` does, while other tasks run."""
        line, what = self._line(process, step, values)
        await write_when_room_async(self._path, lambda: self._file.append(line), what=what, needed=0)

    def _line(self, process: str, step: int, values: Mapping[str, Any]) -> tuple[bytes, str]:
        head = {"time": round(time.time(), 3), "attempt": run_identity().attempt}
        line = json.dumps({**head, "process": process, "step": step, **values}).encode() + b"\n"
        return line, f"the metrics of {process} step {step}"

    def close(self) -> None:
        self._file.close()


class MetricsTail:
    """Follows `metrics.jsonl` from the byte `position` on, by default from where it ends now; `new` returns
    whole new records. `position` is where the next one begins."""

    def __init__(self, path: Path, position: int | None = None) -> None:
        self._path = path
        self.position = position if position is not None else path.stat().st_size if path.exists() else 0

    def new(self) -> list[Record]:
        """The records that were written since the last call. Lines that are none (a process was killed while
        it wrote one) are left out."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self.position)
            data = file.read()
        complete = data.rfind(b"\n") + 1
        self.position += complete
        return list(filter(_is_record, parse_json_lines(data[:complete].splitlines())))


def read_metrics(path: Path) -> Iterator[Record]:
    """The records of a metrics file in order; none without a file."""
    return filter(_is_record, read_json_lines(path))


@dataclass(frozen=True, slots=True)
class Step:
    """What the processes recorded of one step, by process: `orchestrator` of batch `number`, counted from 0,
    `trainer` (or `sft`) of training on it, and the others of the weights before it."""

    number: int
    records: Mapping[str, Record]

    @property
    def trained(self) -> Record | None:
        """The record of the training of this step; None while there is none."""
        return next((self.records[name] for name in TRAINERS if name in self.records), None)

    @property
    def reward(self) -> float | None:
        """The mean reward of the batch."""
        return self.value("orchestrator/reward/mean")

    @property
    def played_reward(self) -> float | None:
        """The mean reward of all that was played for the batch, which says more where a filter chooses what
        is trained on. That of the batch where no other is recorded."""
        played = self.value("orchestrator/reward/played")
        return self.reward if played is None else played

    def value(self, name: str) -> float | None:
        """A number by the name of its process and its own, as `trainer/loss`, or by its own alone; None where
        no such number was recorded, or one beyond 1e30, whose sums no float holds."""
        process, _, metric = name.partition("/")
        found = self.records[process].get(metric) if process in self.records else None
        records = (
            self.records[process] for process in (*_OF_BATCHES, *self.records) if process in self.records
        )
        for given in (found, *(record.get(name) for record in records)):
            if isinstance(given, int | float) and abs(given) <= _LARGEST:
                return float(given)
        return None


class RunMetrics:
    """The records of a run, joined by step.

    A run that is started again begins an attempt, which goes on from a checkpoint. With its first record of a
    step, what earlier attempts recorded of that step and of all that follow no longer counts, whichever
    process it was and in whatever order the lines are: it is not built upon. Nor are measurements of later
    weights.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._records: dict[tuple[int, str], Record] = {}
        self._began: dict[int, int] = {}
        """Attempt -> the first step that it did."""
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Take in one more record."""
        step, process, attempt = record["step"], record["process"], _attempt(record)
        if process in _OF_BATCHES and step < self._began.get(attempt, math.inf):
            self._began[attempt] = step
            self._records = {k: known for k, known in self._records.items() if not self._given_up(known)}
        before = self._records.get((step, process))
        if not self._given_up(record) and (before is None or _attempt(before) <= attempt):
            self._records[step, process] = record

    def steps(self) -> list[Step]:
        """All steps of which something is recorded, in order."""
        by_step: dict[int, dict[str, Record]] = defaultdict(dict)
        for (step, process), record in self._records.items():
            by_step[step][process] = record
        return [Step(number, by_step[number]) for number in sorted(by_step)]

    def of(self, process: str) -> dict[int, Record]:
        """Step -> the record of one process, in order."""
        return {step.number: step.records[process] for step in self.steps() if process in step.records}

    def values(self, name: str) -> dict[int, float]:
        """Step -> a number (see `Step.value`), in order, where there is one."""
        return {s.number: value for s in self.steps() if (value := s.value(name)) is not None}

    def take(self, *, rest: bool = False) -> list[Step]:
        """The steps of which nothing more is expected, in order; they are forgotten here. These are trained,
        and their batch is known or a later one is trained. With `rest` it is all: the run has ended."""
        steps = self.steps()
        newest = max((step.number for step in steps if step.trained is not None), default=-1)
        done = [step for step in steps if rest or step.number < newest or _is_whole(step)]
        for step in done:
            for process in step.records:
                del self._records[step.number, process]
        return done

    def _given_up(self, record: Record) -> bool:
        """Whether a later attempt began before what this record is of."""
        last = record["step"] if record["process"] in _OF_BATCHES else record["step"] - 1
        return any(attempt > _attempt(record) and first <= last for attempt, first in self._began.items())


def read_run(path: Path) -> RunMetrics:
    """The records of a metrics file, joined."""
    return RunMetrics(read_metrics(path))


def _is_whole(step: Step) -> bool:
    return "sft" in step.records or {"trainer", "orchestrator"} <= step.records.keys()


def _attempt(record: Record) -> int:
    return int(record.get("attempt", 1))


def _is_record(line: Record) -> bool:
    """Whether it has a head; what comes from a file may be anything."""
    numbers = (line.get("step"), line.get("attempt", 1))
    return isinstance(line.get("process"), str) and all(isinstance(n, int) and n >= 0 for n in numbers)


class Stopwatch:
    """Seconds by cause, from one record to the next. Every cause is in every record, so that a column of
    `metrics.jsonl` has no holes. `idle` is the cause that is waiting for others, if there is one."""

    def __init__(self, *causes: str, idle: str | None = None) -> None:
        self._seconds = dict.fromkeys(causes, 0.0)
        self._idle = idle
        self._since = time.monotonic()

    @contextmanager
    def of(self, cause: str) -> Iterator[None]:
        """Count the block's duration under `cause`, which must be one of those named at the start."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[cause] += time.monotonic() - started

    def take(self) -> dict[str, float]:
        """`time/<cause>` and `time/total` (all that passed, named or not) since the last call, and
        `idle_ratio`, the share of the total that was idle; then it starts from zero."""
        now = time.monotonic()
        values = {f"time/{cause}": seconds for cause, seconds in self._seconds.items()}
        total = values["time/total"] = now - self._since
        if self._idle is not None:
            values["idle_ratio"] = self._seconds[self._idle] / max(total, 1e-9)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._since = now
        return values


class BusyClock:
    """How much of the time nothing goes on: enter it for everything that does, several at once if need
    be."""

    def __init__(self) -> None:
        self._under_way = 0
        self._busy = 0.0
        self._busy_since = self._since = time.monotonic()

    def __enter__(self) -> None:
        if self._under_way == 0:
            self._busy_since = time.monotonic()
        self._under_way += 1

    def __exit__(self, *_: object) -> None:
        self._under_way -= 1
        if self._under_way == 0:
            self._busy += time.monotonic() - self._busy_since

    def take_idle(self) -> float:
        """The share of the time in which nothing went on, from 0 to 1, since the last call."""
        now = time.monotonic()
        if self._under_way:
            self._busy += now - self._busy_since
            self._busy_since = now
        total = now - self._since
        idle = 1.0 - self._busy / total if total > 0 else 0.0
        self._busy, self._since = 0.0, now
        return min(1.0, max(0.0, idle))
