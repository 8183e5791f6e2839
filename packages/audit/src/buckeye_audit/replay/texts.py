"""What `rl replay` and `rl bisect` print."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from buckeye.base.columns import aligned

if TYPE_CHECKING:
    from buckeye_audit.replay.bisect import Search
    from buckeye_audit.replay.step import Comparison, Replay


def replay_text(replay: Replay) -> str:
    """The stages of the step, the first difference on the way to it, and what that may come from."""
    lines, first = _stages(replay), replay.first_difference
    if first is None:
        lines.append("The same to the last bit.")
        return "\n".join(lines)
    lines.append(f"The first difference is in step {first.step}: {first.stage}, {_difference(first)}.")
    if replay.within_tolerance:
        lines.append(f"It is no more than rounding may bring about ({replay.tolerance:g}).")
    return "\n".join([*lines, *_changes(replay)])


def _stages(replay: Replay) -> list[str]:
    rows = [("stage", "recorded", "now", "difference")]
    rows += [
        (one.stage, _short(one.stage, one.recorded), _short(one.stage, one.replayed), _difference(one))
        for one in replay.comparisons
        if one.step == replay.step
    ]
    lines = [f"Step {replay.step}, from the weights before step {replay.start.step} in {replay.start.path}"]
    return [*lines, "", aligned(rows), ""]


def _changes(replay: Replay) -> list[str]:
    return [f"{name}: {then} then, {now} now" for name, (then, now) in replay.changed.items()]


def all_text(replay: Replay, kept: Sequence[int]) -> str:
    """Whether every step was the same, or which is the first that is not; and which were not computed."""
    first, start = replay.first_unexplained, replay.start
    if first is None:
        count = replay.step - start.step + 1
        head = f"{count} step{'s' if count > 1 else ''} ({start.step} to {replay.step}) from {start.path}"
        how = "the same to the last bit" if replay.first_difference is None else "the same but for rounding"
        lines = [f"{head}: {how}."]
    else:
        told = f"The first difference is in step {first.step}: {first.stage}, {_difference(first)}."
        lines = [*_stages(replay), told, *_changes(replay)]
    if start.step > 0:
        lines.append(
            f"Steps before {start.step} are not computed: no batch, or nothing to begin from, was kept."
        )
    if first is None and replay.step < kept[-1]:
        lines.append(
            f"Batch {replay.step + 1} was not kept, so later steps, up to {kept[-1]}, are not computed."
        )
    return "\n".join(lines)


def search_text(search: Search, good: int, bad: int) -> str:
    """What a search has found, and what it has not looked at."""
    made = f"{search.replays} replay{'s' if search.replays > 1 else ''}"
    lines = _stages(search.found) if search.found is not None else []
    first = search.found.first_unexplained if search.found is not None else None
    if search.found is None or first is None:
        which = f"Steps {good + 1} to {bad}" if search.found is None else f"Step {search.found.step}"
        lines.append(f"{which}: nothing differs from what was recorded ({made}).")
    else:
        lines.append(
            f"The first difference is in step {first.step}: {first.stage}, {_difference(first)} ({made})."
        )
        if first.step <= good:
            lines.append(f"So steps up to {good} are not all right, as --good says.")
        lines += _changes(search.found)
    if search.not_looked_at:
        steps = _steps(search.not_looked_at)
        lines.append(f"Not looked at, because no batch, or nothing to begin from, was kept: {steps}.")
    if search.as_recorded:
        steps = _steps(search.as_recorded)
        lines.append(f"Batches taken as recorded, because what was played was not kept: {steps}.")
    return "\n".join(lines)


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(set(steps))[:8]))
    return f"steps {shown}{' and more' if len(set(steps)) > 8 else ''}"


def search_object(search: Search) -> dict[str, Any]:
    """The same for programs."""
    found = search.found
    first = found and found.first_unexplained
    return {
        "step": first and first.step,
        "stage": first and first.stage,
        "replays": search.replays,
        "not_looked_at": search.not_looked_at,
        "as_recorded": sorted(set(search.as_recorded)),
        "replay": found and replay_object(found),
    }


def replay_object(replay: Replay) -> dict[str, Any]:
    """All of a replay for programs."""
    first = replay.first_difference
    return {
        "step": replay.step,
        "start": {"step": replay.start.step, "path": str(replay.start.path)},
        "identical": first is None,
        "within_tolerance": replay.within_tolerance,
        "tolerance": replay.tolerance,
        "changed": replay.changed,
        "first_difference": None if first is None else {"step": first.step, "stage": first.stage},
        "comparisons": [dataclasses.asdict(one) for one in replay.comparisons],
    }


def _short(stage: str, shown: str) -> str:
    """A checksum, or a figure, with as many digits as a person compares."""
    if stage == "weights":
        return shown[:12]
    return f"{float(shown):.6g}" if stage in ("loss", "gradient") else shown


def _difference(one: Comparison) -> str:
    if one.same:
        return "none"
    size = "not the same" if one.difference is None else f"{one.difference:.3g}"
    return f"{size} at {one.where}" if one.where else size
