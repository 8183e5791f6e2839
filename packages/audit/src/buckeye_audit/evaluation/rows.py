"""The rollouts of an evaluation on the disk: one JSON object a line, each written when its rollout ends."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from buckeye.base.storage import utf8
from buckeye.errors import UsageError
from buckeye.orchestrator.rollout import Rollout

ROLLOUTS = "rollouts.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One rollout. `rollout` counts those of a task from 0; `reward` is None exactly when `error` is set."""

    task_id: str
    rollout: int
    reward: float | None
    error: str | None = None
    stop_reason: str = "done"
    truncated: bool = False
    components: Mapping[str, float] = field(default_factory=dict)
    explanations: Mapping[str, str] = field(default_factory=dict)
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict)
    messages: list[Mapping[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        """One line, without its end; what JSON cannot hold is written as text."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(values, ensure_ascii=False, default=str)


def row_of(rollout: Rollout, number: int) -> Row:
    """The row of a rollout, the `number`th of its task."""
    return Row(
        task_id=rollout.task.id,
        rollout=number,
        reward=rollout.reward,
        error=rollout.outcome.error,
        stop_reason=rollout.outcome.stop_reason,
        truncated=rollout.truncated,
        components=dict(rollout.outcome.components),
        explanations=dict(rollout.outcome.explanations),
        turns=rollout.turns,
        prompt_tokens=rollout.prompt_tokens,
        completion_tokens=rollout.completion_tokens,
        seconds=round(rollout.seconds, 3),
        data=dict(rollout.task.data),
        messages=list(rollout.messages),
    )


class RowFile:
    """Appends rows. Every row is on the disk when `add` returns, so an interruption costs only what is being
    played."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def add(self, row: Row) -> None:
        """Write one row."""
        data = utf8(f"{row.to_json()}\n")
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_rows(path: Path) -> dict[tuple[str, int], Row]:
    """The newest row of every rollout of a file, by task and number; none if there is no file.

    A last line without its end was being written when the evaluation was killed: it is left out. Raises
    UsageError for another line that is no row.
    """
    rows: dict[tuple[str, int], Row] = {}
    if not path.exists():
        return rows
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        if not line.strip():
            continue
        try:
            row = msgspec.convert(json.loads(line), Row)
        except (ValueError, TypeError, RecursionError):
            if number == len(lines) - 1:
                continue
            raise UsageError(f"{path}:{number}: this line is no rollout of an evaluation") from None
        rows[row.task_id, row.rollout] = row
    return rows


def _end_last_line(path: Path) -> None:
    """Cut off what was being written when the writer was killed."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
