"""Where the time of a loop goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
        `idle_ratio`, the share of the total that was idle; starts anew."""
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
        """The share of the time since the last call in which nothing went on, from 0 to 1; starts anew."""
        now = time.monotonic()
        if self._under_way:
            self._busy += now - self._busy_since
            self._busy_since = now
        total = now - self._since
        idle = 1.0 - self._busy / total if total > 0 else 0.0
        self._busy, self._since = 0.0, now
        return min(1.0, max(0.0, idle))
