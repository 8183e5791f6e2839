"""What the numbers of a run are sent to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from buckeye.monitor.metrics import HEAD, Step


@dataclass
class Tracker:
    """What numbers are sent to, as the run `run_id` there. `begin`, `log` and `finish` may raise anything;
    `folder` is that in the run directory, and the name of the module and of the extra."""

    settings: Any
    output_dir: Path
    run_id: str
    config: Any
    title: ClassVar[str]
    folder: ClassVar[str]

    def begin(self) -> None:
        """Open what is logged to."""

    def log(self, step: Step) -> None:
        """Send what is known of a step."""

    def finish(self, *, failed: bool) -> None:
        """Send the rest; the run is over."""

    @property
    def rest(self) -> str:
        """Where what was not sent is, or how to send it."""
        return str(self.output_dir / "metrics.jsonl")


def numbers_of(step: Step) -> dict[str, Any]:
    """All that was recorded of a step, as `<process>/<name>`."""
    return {
        f"{process}/{name}": value
        for process, record in step.records.items()
        for name, value in record.items()
        if name not in HEAD
    }


def reason_of(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
