"""The rollouts of an evaluation on the disk: one JSON object a line, each written when its rollout ends."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from buckeye.base.json_lines import LineFile, read_json_lines
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

    def to_line(self) -> bytes:
        """A line of JSON; what JSON cannot hold is written as text."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return utf8(json.dumps(values, ensure_ascii=False, default=str) + "\n")


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


def read_rows(path: Path) -> dict[tuple[str, int], Row]:
    """Read the newest row of every rollout of a file, by task and number; none if there is no file.

    Half a line, of an evaluation that was killed, is left out. Raises UsageError for another object that is
    no row.
    """
    try:
        rows = [msgspec.convert(record, Row) for record in read_json_lines(path)]
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} has a line that is no rollout of an evaluation: {error}") from None
    return {(row.task_id, row.rollout): row for row in rows}


def open_rows(path: Path) -> LineFile:
    """Open the file for appending, without the half line that a killed evaluation has left at its end."""
    file = LineFile(path)
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)
    return file
