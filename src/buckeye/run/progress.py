"""What the user sees while a run goes on: a live line on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from buckeye.monitor.metrics import MetricsTail


@dataclass(slots=True)
class RunState:
    """The newest numbers of a run, gathered from the records of its processes."""

    max_steps: int | None
    step: int = 0
    trained: int = 0
    reward: float | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    staleness: float | None = None

    def take(self, record: dict[str, Any]) -> bool:
        """Update from one record; True if a training step was completed."""
        if record["process"] == "orchestrator":
            self.reward = record["reward/mean"]
            self.tokens_per_second = record["perf/throughput"]
            self.staleness = record["batch/off_policy_level/max"]
        if record["process"] == "trainer":
            self.loss = record.get("loss")
            self.step = record["step"] + 1
            self.trained += 1
            return True
        return False

    def line(self, seconds_left: float | None) -> str:
        """`Step 3/100 | reward 0.1160 | ...`; what is not known yet is left out."""
        total = f"/{self.max_steps}" if self.max_steps is not None else ""
        parts = [f"Step {self.step}{total}"]
        if self.reward is not None:
            parts.append(f"reward {self.reward:.4f}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.staleness is not None:
            parts.append(f"staleness {self.staleness:.0f}")
        if seconds_left is not None:
            parts.append(f"{human_duration(seconds_left)} left")
        return " | ".join(parts)


class Progress:
    """Prints the progress of a run. On a terminal it rewrites one line; piped it prints a line per step."""

    def __init__(self, metrics: Path, *, max_steps: int | None, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._tail = MetricsTail(metrics)
        self._state = RunState(max_steps=max_steps)
        self._step_times: deque[float] = deque(maxlen=20)
        self._started = time.monotonic()
        self._shown = ""

    @property
    def step(self) -> int:
        """Steps that the run has done."""
        return self._state.step

    @property
    def trained(self) -> int:
        """Steps that were trained since this was made; those that were trained again count again."""
        return self._state.trained

    def update(self, waiting_for: str) -> None:
        """Read what is new and show it. `waiting_for` is shown on a terminal until the first step is done."""
        for record in self._tail.new():
            if self._state.take(record):
                self._step_times.append(time.monotonic())
                if not self._live:
                    self._print(self._state.line(self._seconds_left()) + "\n")
        if self._live:
            elapsed = human_duration(time.monotonic() - self._started)
            text = self._state.line(self._seconds_left()) if self._step_times else waiting_for
            self._print(f"\r\x1b[2K{elapsed} | {text}"[: 4 + _columns()])

    def tell(self, lines: Sequence[str]) -> None:
        """Print lines above the live one."""
        if lines:
            self.clear()
            self._print("".join(f"{line}\n" for line in lines))

    def clear(self) -> None:
        """Take the live line away, so that a log line can be printed."""
        if self._live and self._shown:
            self._print("\r\x1b[2K")
            self._shown = ""

    def _print(self, text: str) -> None:
        if text != self._shown:
            self._stream.write(text)
            self._stream.flush()
            self._shown = text

    def _seconds_left(self) -> float | None:
        if self._state.max_steps is None or len(self._step_times) < 2:
            return None
        per_step = (self._step_times[-1] - self._step_times[0]) / (len(self._step_times) - 1)
        return per_step * (self._state.max_steps - self._state.step)


def _columns() -> int:
    return shutil.get_terminal_size().columns


def human_duration(seconds: float) -> str:
    """45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
