"""File with the rollouts of an evaluation. Each rollout is a JSON line, written when the rollout ends."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from buckeye.base.json_lines import LineFile, parse_json_lines, read_json_lines
from buckeye.envs.stdlib_only.outcomes import MAX_NUMBER
from buckeye.errors import UsageError

ROLLOUTS = "rollouts.jsonl"

Score = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""Reward or component, within the limit of outcomes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRow:
    """Rollout on disk, with either a `reward` or an `error`.

    `rollout` is its index among the rollouts of the task.
    """

    task_id: str
    rollout: int
    reward: Score | None
    error: str | None = None
    stop_reason: str = "done"
    truncated: bool = False
    components: Mapping[str, Score] = field(default_factory=dict)
    explanations: Mapping[str, str] = field(default_factory=dict)
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict)
    messages: list[Mapping[str, Any]] = field(default_factory=list)


def parse_row(line: bytes) -> EvalRow:
    """Return the row of a line of `Rollout.evaluation_line`."""
    return msgspec.convert(json.loads(line), EvalRow)


def read_rows(path: Path) -> dict[tuple[str, int], EvalRow]:
    """Return the newest row of every rollout in a file, by task id and number. A missing file has no rows.

    A partial line from a killed evaluation is ignored. Raise `UsageError` for a line that is not a row.
    """
    try:
        rows = [msgspec.convert(record, EvalRow) for record in read_json_lines(path)]
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path} has a line that is not a rollout of an evaluation: {error}", code="BK-FILE-FORMAT"
        ) from None
    return {(row.task_id, row.rollout): row for row in rows}


def open_rows(path: Path) -> LineFile:
    """Open the file for appending, and remove a partial line from a killed evaluation.

    A row that lacks only its newline stays: `read_rows` counts it.
    """
    file = LineFile(path)
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if not list(parse_json_lines([content[end:]])):
        os.truncate(path, end)
    return file
