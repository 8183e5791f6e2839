"""Read the rollouts of a run in order, with secrets removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from buckeye.monitor.redact import redact
from buckeye.monitor.rollouts import RecordedRollout
from buckeye.runs import Run

_ROW = (
    *("split", "step", "group", "env", "task", "dropped", "number", "reward", "shaped_reward", "advantage"),
    *("components", "stop_reason", "error", "truncated", "cut", "retried", "seconds", "sampling_seconds"),
    *("turns", "segments", "completion_tokens", "oldest_version", "prompt", "text"),
)
_QUERY = (
    f"SELECT path, at, bytes, {', '.join('grp' if name == 'group' else name for name in _ROW)} "  # noqa: S608  constant names
    "FROM rollouts WHERE ? IS NULL OR step = ? ORDER BY split DESC, step, env, grp, number, at"
)
_BOOLEANS = ("truncated", "cut", "retried")


@dataclass(frozen=True, slots=True)
class IndexedRollout:
    """Rollout with its columns in the table of rollouts (`row`), and with its texts (`rollout`)."""

    row: dict[str, Any]
    rollout: RecordedRollout


def read_indexed_rollouts(run: Run, step: int | None) -> Iterator[IndexedRollout]:
    """Yield the training and evaluation rollouts of one step, or of all steps; skip deleted rollouts."""
    for path, at, size, *values in run.index.execute(_QUERY, (step, step)):
        row = dict(zip(_ROW, values, strict=True))
        rollout = run.text_at(path, at, size, row["group"], row["number"])
        if rollout is not None:
            yield _without_secrets(row, rollout)


def _without_secrets(row: dict[str, Any], rollout: RecordedRollout) -> IndexedRollout:
    """Return the rollout without secrets, and without unpaired surrogates, which UTF-8 cannot encode."""
    row |= {name: bool(row[name]) for name in _BOOLEANS if row[name] is not None}
    both = json.dumps(redact([row, msgspec.to_builtins(rollout)]), ensure_ascii=False)
    row, values = json.loads(both.encode(errors="replace"))
    return IndexedRollout(row, msgspec.convert(values, RecordedRollout))
