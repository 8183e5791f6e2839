"""Progress of a run on the console: a live line on a terminal, one plain line per step otherwise."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from buckeye.base.columns import quoted
from buckeye.base.storage import step_directories
from buckeye.base.terminal import has_escape_codes
from buckeye.launch.preflight.trainer_forecast import (
    MEASURED_STEPS,
    RefinedForecast,
    TrainerForecast,
    refine,
)
from buckeye.monitor.metrics import MetricsTail, Record, RunMetrics, StepMetrics

_SHOWN_METRICS = {
    "orchestrator/reward/mean": "reward {:.4f}",
    "trainer/loss": "loss {:.4f}",
    "orchestrator/perf/throughput": "{:,.0f} tokens/s",
    "orchestrator/batch/off_policy_level/max": "staleness {:.0f}",
}
"""Metrics that the line of a step shows, with their formats."""
_MEASURED = 20  # number of the last steps that the remaining time depends on


class Progress:
    """Prints the progress of a run: one live line on a terminal, one line per step otherwise.

    The remaining time is that of the `forecast`, corrected by the last measured steps. Without a forecast, or
    before the third step, it follows the times between steps.
    """

    def __init__(
        self,
        metrics: Path,
        *,
        max_steps: int | None,
        forecast: TrainerForecast | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stdout
        self._live = has_escape_codes(self._stream)
        self._tail = MetricsTail(metrics)
        self._metrics = RunMetrics()
        self._max_steps = max_steps
        self._forecast = forecast
        self._measured: deque[Record] = deque(maxlen=_MEASURED)  # without the first step, the warm-up
        self._newest: StepMetrics | None = None
        self._step_times: deque[float] = deque(maxlen=_MEASURED)
        self._started = time.monotonic()
        self._shown = ""
        self.step = 0
        """Number of finished steps of the run."""
        self.trained = 0
        """Number of steps that were trained since this object was created. A step that a restart repeats
        counts again."""
        self.first_trained: list[Record] = []
        """The trainer's metrics of the first three of these steps that had tokens to train on."""

    def update(self, waiting_for: str, *, ended: bool = False) -> None:
        """Read new metrics and show them.

        A terminal shows `waiting_for` until the first step is done. A step is shown when the metrics of both
        trainer and orchestrator are known, or when the run has `ended`.
        """
        for record in self._tail.read_new():
            self._metrics.add(record)
            if record["process"] == "trainer":
                self.step = record["step"] + 1
                self.trained += 1
                if record.get("tokens_computed"):
                    self._add_measured(record)
                self._step_times.append(time.monotonic())
        for step in self._metrics.take(rest=ended):
            if step.trained is not None:
                self._newest = step
                if not self._live:
                    self._print(self._line(step) + "\n")
        if self._live:
            elapsed = human_duration(time.monotonic() - self._started)
            text = self._line(self._newest) if self._newest is not None else waiting_for
            self._print(f"\r\x1b[2K{elapsed} | {text}"[: 4 + _columns()])

    def _add_measured(self, record: Record) -> None:
        if self.first_trained:
            self._measured.append(record)
        if len(self.first_trained) < MEASURED_STEPS:
            self.first_trained.append(record)

    def _time_left(self) -> str:
        """Return the time of the steps left as text, or "" if their number or speed is unknown."""
        if self._max_steps is None or len(self._step_times) < 2:
            return ""
        steps = self._max_steps - self.step
        if self._forecast is not None and len(self.first_trained) == MEASURED_STEPS:
            return f"{human_duration(refine(self._forecast, self._measured).seconds_left(steps)[1])} left"
        per_step = (self._step_times[-1] - self._step_times[0]) / (len(self._step_times) - 1)
        return f"{human_duration(per_step * steps)} left"

    def print_lines(self, lines: Sequence[str]) -> None:
        """Print lines above the live line."""
        if lines:
            self.clear()
            self._print("".join(f"{line}\n" for line in lines))

    def clear(self) -> None:
        """Erase the live line, so that a log line can be printed."""
        if self._live and self._shown:
            self._print("\r\x1b[2K")
            self._shown = ""

    def _print(self, text: str) -> None:
        if text != self._shown:
            self._stream.write(text)
            self._stream.flush()
            self._shown = text

    def _line(self, step: StepMetrics) -> str:
        """Return the line of a step, such as `Step 3/100 | reward 0.1160`, without unknown metrics."""
        number = step.number + 1
        parts = [f"Step {number}/{self._max_steps}" if self._max_steps is not None else f"Step {number}"]
        for name, template in _SHOWN_METRICS.items():
            value = step.value(name)
            if value is not None:
                parts.append(template.format(value))
        if left := self._time_left():
            parts.append(left)
        return " | ".join(parts)


def describe_time_left(rest: RefinedForecast, steps: int) -> str:
    """Return the time of the `steps` left as text, with its range."""
    low, middle, high = map(human_duration, rest.seconds_left(steps))
    return f"{middle} ({low} to {high}) left for {steps} {'step' if steps == 1 else 'steps'}"


def _columns() -> int:
    return shutil.get_terminal_size().columns


def human_duration(seconds: float) -> str:
    """Return a duration as text: `45 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def describe_weights(output_dir: Path, *, is_adapter: bool) -> str:
    """Return the directory of the newest published weights of a run, and commands to use them."""
    root = output_dir / "weights"
    weights = [root, *step_directories(root).values()][-1]
    text = f"{'adapter' if is_adapter else 'model'}: {weights} | chat: buckeye chat {quoted(weights)}"
    if is_adapter:
        text += f" | merge: buckeye export {quoted(output_dir)} --step last --merge-lora"
    return text
