"""Texts from training, to compare an exported model with its checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buckeye.base.json_lines import read_json_lines
from buckeye.monitor.rollouts import ROLLOUTS_FOLDER, rollouts_files
from buckeye.runs.reader import value_at

if TYPE_CHECKING:
    from buckeye.trainer.output.checkpoint_export import ComparisonTexts

_MAX_LINES = 64
"""Maximum number of lines to read from a file, because rollouts may be long."""
_MAX_TEXTS = 4


def read_comparison_texts(run: Path, kind: str, config: Mapping[str, Any], step: int) -> ComparisonTexts:
    """Return a few texts from training, or no texts if their files are deleted or unreadable.

    For `rl`, they are rollouts of the newest step before `step` whose file exists. For `sft`, they are chats
    of the training data.
    """
    from buckeye.trainer.output.checkpoint_export import ComparisonTexts  # needs torch

    if kind == "sft":
        data = Path(str(value_at(config, "data.path")))
        return ComparisonTexts(
            chats=_evenly_spaced(_read(data)), source=f"{data.name}, which it was trained on"
        )
    for at, path in sorted(rollouts_files(run / ROLLOUTS_FOLDER), reverse=True):
        rows = [row for row in _read(path) if row.get("text")] if at < step else []
        if rows:
            texts = [str(row["text"][-1]) for row in _evenly_spaced(rows)]
            return ComparisonTexts(texts=texts, source=f"the run's own rollouts of step {at}")
    return ComparisonTexts()


def _read(path: Path) -> list[dict[str, Any]]:
    with suppress(OSError):
        return list(itertools.islice(read_json_lines(path), _MAX_LINES))
    return []


def _evenly_spaced(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a few evenly spaced rows, because rollouts of one task are adjacent."""
    return rows[:: max(1, len(rows) // _MAX_TEXTS)][:_MAX_TEXTS]
