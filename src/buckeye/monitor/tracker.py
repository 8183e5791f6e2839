"""Interface of experiment trackers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from buckeye.monitor.metrics import RECORD_KEYS, StepMetrics


@dataclass
class Tracker:
    """Experiment tracker, such as Weights & Biases. The tracker's run has the id `run_id`.

    `begin`, `log` and `finish` may raise any exception. `folder` names its folder in the run directory, its
    Python module, and the extra of pip that installs it.
    """

    settings: Any
    output_dir: Path
    run_id: str
    config: Any
    title: ClassVar[str]
    folder: ClassVar[str]

    def begin(self) -> None:
        """Open the tracker's run."""

    def log(self, step: StepMetrics) -> None:
        """Send the records of a step."""

    def finish(self, *, failed: bool) -> None:
        """Send all unsent data, because the run has ended."""

    @property
    def rest(self) -> str:
        """Location of unsent data, or the command that sends it."""
        return str(self.output_dir / "metrics.jsonl")


def step_values(step: StepMetrics) -> dict[str, Any]:
    """Return all values recorded for a step, as `<process>/<name>`."""
    return {
        f"{process}/{name}": value
        for process, record in step.records.items()
        for name, value in record.items()
        if name not in RECORD_KEYS
    }


def error_summary(error: Exception) -> str:
    """Return the type of an error and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
