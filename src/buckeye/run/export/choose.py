"""Which checkpoint of a run is exported, and what is known of its evaluations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.checkpoint import CheckpointInfo, list_checkpoints, resolve_checkpoint
from buckeye.errors import UsageError
from buckeye.monitor.metrics import latest_by_step
from buckeye.storage import read_json, step_directories


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The evaluation of one environment after `step` steps, by the run's `attempt`. `restarts` has the step
    that each attempt up to this one went on from; an attempt that began anew is not in it."""

    environment: str
    step: int
    attempt: int
    mean_reward: float
    rollouts: int
    split: str
    restarts: Mapping[int, int]

    def is_of(self, info: CheckpointInfo) -> bool:
        """Whether the evaluated weights come before or after a checkpoint in one line of training. They do
        not if an attempt between the two went on from before the checkpoint: its step was trained again."""
        between = range(info.attempt + 1, self.attempt + 1)
        return self.attempt >= info.attempt and all(self.restarts.get(a, -1) >= info.step for a in between)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A checkpoint, and why it is this one."""

    info: CheckpointInfo
    reason: str


def choose_checkpoint(run: Path, step: str, scores: Sequence[Score], *, reach: int) -> Choice:
    """The checkpoint of `run` that `step` means: `best`, `last`, or a number.

    The best one has the highest mean reward over all evaluated environments (see `scores_of`); in a run of
    supervised fine-tuning, the lowest validation loss. Of equals it is the later one. Raises UsageError where
    nothing was measured, and CheckpointError where there is no such checkpoint.
    """
    root = run / "checkpoints"
    if step == "last":
        return Choice(info=resolve_checkpoint(root, -1), reason="the newest checkpoint")
    if step.isdigit():
        return Choice(info=resolve_checkpoint(root, int(step)), reason="as asked for")
    if step != "best":
        raise UsageError(f"--step {step}: write best, last, or the number of a checkpoint's step")
    resolve_checkpoint(root, -1)  # says so if there is none at all
    checkpoints = {info.step: info for info in list_checkpoints(root)}
    return (
        _best_by_reward(checkpoints, scores, reach) or _best_by_loss(checkpoints, run) or _not_measured(run)
    )


def read_scores(run: Path) -> list[Score]:
    """Every complete evaluation in a run directory, by step."""
    restarts = _restarts(run)
    return [
        Score(
            environment=path.stem,
            step=step,
            attempt=int(figures.get("attempt", 1)),
            mean_reward=float(figures["mean_reward"]),
            rollouts=int(figures["n"]),
            split=str(figures.get("split", "eval")),
            restarts=restarts,
        )
        for step, folder in step_directories(run / "evals").items()
        for path in sorted(folder.glob("*.json"))
        if path.with_suffix(".jsonl").exists()  # written last
        and (figures := _figures(path)).get("mean_reward") is not None
    ]


def scores_of(info: CheckpointInfo, scores: Sequence[Score], *, reach: int) -> list[Score]:
    """The evaluation of each environment that is nearest to a checkpoint, at most `reach` steps away: where
    sampling runs ahead of training, what is evaluated is that much older or younger than the checkpoint.

    Those of other weights do not count: of an attempt before the one that wrote the checkpoint, or of a later
    one that trained its step again.
    """
    near = [s for s in scores if abs(s.step - info.step) <= reach and s.is_of(info)]
    nearest: dict[str, Score] = {}
    for score in sorted(near, key=lambda s: (abs(s.step - info.step), s.step)):
        nearest.setdefault(score.environment, score)
    return [nearest[name] for name in sorted(nearest)]


def _restarts(run: Path) -> dict[int, int]:
    """Attempt -> the step that it went on from, of those that did."""
    try:
        attempts = read_json(run / "run.json")["attempts"]
        resumed = {int(each["attempt"]): each["resumed_step"] for each in attempts}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run / 'run.json'} cannot be read: {error!r}") from error
    return {attempt: int(step) for attempt, step in resumed.items() if step is not None}


def _figures(path: Path) -> Mapping[str, Any]:
    try:
        figures = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"The evaluation {path} cannot be read: {error}") from error
    return figures if isinstance(figures, dict) else {}


def _best_by_reward(
    checkpoints: Mapping[int, CheckpointInfo], scores: Sequence[Score], reach: int
) -> Choice | None:
    measured = {step: scores_of(info, scores, reach=reach) for step, info in checkpoints.items()}
    environments = {s.environment for found in measured.values() for s in found}
    complete = {
        step: statistics.fmean(s.mean_reward for s in found)
        for step, found in measured.items()
        if found and {s.environment for s in found} == environments
    }
    if not complete:
        return None
    best = max(complete, key=lambda step: (complete[step], step))
    reason = (
        f"the best of {len(complete)} evaluated checkpoints by mean reward "
        f"({complete[best]:.4f} over {', '.join(sorted(environments))}{_measured_at(measured[best], best)})"
    )
    return Choice(info=checkpoints[best], reason=reason)


def _measured_at(scores: Sequence[Score], step: int) -> str:
    """Says at which step the evaluations were, if not at the checkpoint's."""
    others = sorted({score.step for score in scores} - {step})
    return f", measured after {' and '.join(map(str, others))} steps" if others else ""


def _best_by_loss(checkpoints: Mapping[int, CheckpointInfo], run: Path) -> Choice | None:
    records = latest_by_step(run / "metrics.jsonl", "validation")
    losses = {
        step: float(r["val_loss"]) for step, r in records.items() if step in checkpoints and "val_loss" in r
    }
    if not losses:
        return None
    best = min(losses, key=lambda step: (losses[step], -step))
    reason = f"the best of {len(losses)} measured checkpoints by validation loss ({losses[best]:.4f})"
    return Choice(info=checkpoints[best], reason=reason)


def _not_measured(run: Path) -> Choice:
    raise UsageError(
        f"Which checkpoint of {run} is the best is not known: none was evaluated. Choose --step last or a "
        "number; the next run knows it with an [eval] table (or, in sft, data.val_path)."
    )
