"""What `rl replay` prints."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from buckeye.base.columns import aligned

if TYPE_CHECKING:
    from buckeye_audit.replay.step import Comparison, Replay


def replay_text(replay: Replay) -> str:
    """The stages of the step, the first difference on the way to it, and what that may come from."""
    rows = [("stage", "recorded", "now", "difference")]
    rows += [
        (one.stage, _short(one.stage, one.recorded), _short(one.stage, one.replayed), _difference(one))
        for one in replay.comparisons
        if one.step == replay.step
    ]
    lines = [f"Step {replay.step}, from the weights before step {replay.start.step} in {replay.start.path}"]
    lines += ["", aligned(rows), ""]
    first = replay.first_difference
    if first is None:
        lines.append("The same to the last bit.")
        return "\n".join(lines)
    lines.append(f"The first difference is in step {first.step}: {first.stage}, {_difference(first)}.")
    if replay.within_tolerance:
        lines.append(f"It is no more than rounding may bring about ({replay.tolerance:g}).")
    lines += [f"{name}: {then} then, {now} now" for name, (then, now) in replay.changed.items()]
    return "\n".join(lines)


def replay_json(replay: Replay) -> str:
    """All of a replay as one JSON object."""
    first = replay.first_difference
    said = {
        "step": replay.step,
        "start": {"step": replay.start.step, "path": str(replay.start.path)},
        "identical": first is None,
        "within_tolerance": replay.within_tolerance,
        "tolerance": replay.tolerance,
        "changed": replay.changed,
        "first_difference": None if first is None else {"step": first.step, "stage": first.stage},
        "comparisons": [dataclasses.asdict(one) for one in replay.comparisons],
    }
    return json.dumps(said)


def _short(stage: str, shown: str) -> str:
    """A checksum, or a figure, with as many digits as a person compares."""
    if stage == "weights":
        return shown[:12]
    return shown if stage == "log-probs" else f"{float(shown):.6g}"


def _difference(one: Comparison) -> str:
    if one.same:
        return "none"
    size = "not the same" if one.difference is None else f"{one.difference:.3g}"
    return f"{size} at {one.where}" if one.where else size
