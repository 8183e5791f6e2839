"""Reader of a run: its metrics, events, rollouts and training batches.

The run may be active, finished, crashed, or a copy. Data is read on first use.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from buckeye.base.json_lines import parse_json_lines
from buckeye.base.storage import read_json, step_directories
from buckeye.errors import TransportError
from buckeye.monitor.metrics import StepMetrics, read_run_metrics
from buckeye.monitor.rollouts import RecordedRollout
from buckeye.run_files.known_runs import find_run
from buckeye.runs.index import open_index

if TYPE_CHECKING:
    from buckeye.runs.trained_step import TrainedStep


def value_at(settings: Any, name: str) -> Any:
    """Return a value of recorded settings, such as `trainer.optim.lr`; None if the value is missing."""
    for part in name.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings


_RUN_FILES = ("metrics.jsonl", "events.jsonl", "run.json", "status.json", "rollouts", "trained")


def open_run(run: str | Path) -> Run:
    """Return the run with this directory, name or prefix of its id. Raise `UsageError` if no run matches."""
    path = Path(run)
    if not any((path / name).exists() for name in _RUN_FILES):
        path = find_run(str(run))
    return Run(path)


@dataclass(frozen=True)
class Run:
    """Contents of a run directory. docs/how-to/inspect-runs.md has examples.

    `unreadable` lists the damaged parts that were skipped.
    """

    path: Path
    unreadable: list[str] = field(default_factory=list)

    @cached_property
    def steps(self) -> list[StepMetrics]:
        """Recorded metrics of all processes, joined by step, in order."""
        return read_run_metrics(self.path / "metrics.jsonl").steps()

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the whole run from `configs/rl.json`; empty if the file cannot be read."""
        try:
            found = read_json(self.path / "configs" / "rl.json")
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def setting(self, name: str) -> Any:
        """Return one setting, such as `trainer.optim.lr`; None if the setting is missing."""
        return value_at(self.settings, name)

    @cached_property
    def index(self) -> sqlite3.Connection:
        """Up-to-date index of the rollouts, with the table `rollouts`."""
        return open_index(self.path)

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of an SQL query on the index."""
        return self.index.execute(sql, values).fetchall()

    @property
    def tokenizer_directory(self) -> Path | None:
        """Directory with the tokenizer: the newest weights, else the initial model, or None."""
        named = self.setting("trainer.model.name") or self.setting("model.name")
        published = reversed(step_directories(self.path / "weights").values())
        folders = [*published, *([Path(named)] if isinstance(named, str) else [])]
        return next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)

    @property
    def kept_steps(self) -> list[int]:
        """Steps whose batch was kept, in order."""
        return list(step_directories(self.path / "trained"))

    def trained(self, step: int) -> TrainedStep | None:
        """Return the batch of a step with the trainer's results; None if it was not kept, or is damaged."""
        from buckeye.runs.trained_step import read_trained_step  # needs numpy, which is slow to import

        try:
            return read_trained_step(self.path, step, self.query(_SEGMENTS, step))
        except TransportError as error:
            self._record_unreadable(str(error))
            return None

    def text_of(self, step: int, group: int, number: int) -> RecordedRollout | None:
        """Return a training rollout with its texts; None if the texts were deleted."""
        locations = self.query(_LOCATION, step, group, number)
        found = (self.text_at(path, at, size, group, number) for path, at, size in locations)
        return next((rollout for rollout in found if rollout is not None), None)

    def text_at(self, path: str, at: int, size: int, group: int, number: int) -> RecordedRollout | None:
        """Return the rollout at `size` bytes from offset `at` of a file; None if it cannot be read."""
        try:
            with (self.path / path).open("rb") as file:
                file.seek(at)
                lines = list(parse_json_lines([file.read(size)]))
            return msgspec.convert({**lines[0], "group": group, "number": number}, RecordedRollout)
        except (OSError, IndexError, msgspec.ValidationError) as error:
            self._record_unreadable(f"{path}: {error}")
            return None

    def _record_unreadable(self, what: str) -> None:
        if what not in self.unreadable:
            self.unreadable.append(what)


_SEGMENTS = (
    "SELECT grp, number, segments, truncated FROM rollouts WHERE split = 'train' AND step = ? "
    "AND dropped IS NULL AND retried = 0 AND reward IS NOT NULL ORDER BY path, at"
)
_LOCATION = (
    "SELECT path, at, bytes FROM rollouts WHERE split = 'train' AND step = ? AND grp = ? AND number = ? "
    "AND retried = 0"
)
