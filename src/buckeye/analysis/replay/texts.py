"""Format the output of `rl replay`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from buckeye.base.columns import align_columns

if TYPE_CHECKING:
    from buckeye.analysis.replay.replay_step import Replay, StageComparison


def replay_text(replay: Replay) -> str:
    """Return a replayed step as text: its stages, the first difference, and possible causes."""
    lines, first = _stages(replay), replay.first_difference
    if first is None:
        lines.append("The same to the last bit.")
        return "\n".join(lines)
    lines.append(f"The first difference is in step {first.step}: {first.stage}, {_difference(first)}.")
    if replay.within_tolerance:
        lines.append(f"All differences are within rounding ({replay.tolerance:g}).")
    return "\n".join([*lines, *_changes(replay)])


def _stages(replay: Replay) -> list[str]:
    rows = [("stage", "recorded", "now", "difference")]
    rows += [
        (
            comparison.stage,
            _short(comparison.stage, comparison.recorded),
            _short(comparison.stage, comparison.replayed),
            _difference(comparison),
        )
        for comparison in replay.comparisons
        if comparison.step == replay.step
    ]
    lines = [f"Step {replay.step}, from the weights before step {replay.start.step} in {replay.start.path}"]
    return [*lines, "", align_columns(rows), ""]


def _changes(replay: Replay) -> list[str]:
    return [f"{name}: {then} then, {now} now" for name, (then, now) in replay.changed.items()]


def full_replay_text(replay: Replay, kept: Sequence[int]) -> str:
    """Return a full replay as text: the first difference beyond rounding, and the steps not computed."""
    first, start = replay.first_unexplained, replay.start
    if first is None:
        count = replay.step - start.step + 1
        head = f"{count} step{'s' if count > 1 else ''} ({start.step} to {replay.step}) from {start.path}"
        how = "the same to the last bit" if replay.first_difference is None else "the same but for rounding"
        lines = [f"{head}: {how}."]
    else:
        found = f"The first difference is in step {first.step}: {first.stage}, {_difference(first)}."
        lines = [*_stages(replay), found, *_changes(replay)]
    if start.step > 0:
        lines.append(
            f"Steps before {start.step} are not computed: their batches, or a checkpoint before them, "
            "were not kept."
        )
    if first is None and replay.step < kept[-1]:
        lines.append(
            f"Batch {replay.step + 1} was not kept, so later steps, up to {kept[-1]}, are not computed."
        )
    return "\n".join(lines)


def replay_to_json(replay: Replay) -> dict[str, Any]:
    """Return the object that `rl replay --json` prints."""
    first = replay.first_difference
    return {
        "step": replay.step,
        "start": {"step": replay.start.step, "path": str(replay.start.path)},
        "identical": first is None,
        "within_tolerance": replay.within_tolerance,
        "tolerance": replay.tolerance,
        "changed": replay.changed,
        "first_difference": None if first is None else {"step": first.step, "stage": first.stage},
        "comparisons": [dataclasses.asdict(comparison) for comparison in replay.comparisons],
    }


def _short(stage: str, shown: str) -> str:
    """Shorten a recorded or replayed value for display."""
    if stage == "weights":
        return shown[:12]
    return f"{float(shown):.6g}" if stage in ("loss", "gradient") else shown


def _difference(comparison: StageComparison) -> str:
    if comparison.is_identical:
        return "none"
    size = "not the same" if comparison.difference is None else f"{comparison.difference:.3g}"
    return f"{size} at {comparison.where}" if comparison.where else size
