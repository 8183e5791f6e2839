"""Which checkpoint of a run is exported, and what is known of its evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.checkpoint import CheckpointInfo, Score, best_by_reward, list_checkpoints, resolve_checkpoint
from buckeye.errors import UsageError
from buckeye.monitor.metrics import read_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A checkpoint, and why it is this one."""

    info: CheckpointInfo
    reason: str


def choose_checkpoint(run: Path, step: str | None, scores: Sequence[Score]) -> Choice:
    """The checkpoint of `run` that `step` means: `best`, `last`, a number, or None for the best one
    where that is known, else the newest.

    The best one has the highest mean reward over all evaluated environments (see `scores_of`); in a run of
    supervised fine-tuning, the lowest validation loss. Of equals it is the later one. Raises UsageError where
    `best` is asked for and nothing was measured, and CheckpointError where there is no such checkpoint.
    """
    root = run / "checkpoints"
    if step == "last":
        return Choice(info=resolve_checkpoint(root, -1), reason="the newest checkpoint")
    if step is not None and step.isdigit():
        return Choice(info=resolve_checkpoint(root, int(step)), reason="as asked for")
    if step not in (None, "best"):
        raise UsageError(f"--step {step}: write best, last, or the number of a checkpoint's step")
    newest = resolve_checkpoint(root, -1)  # says so if there is none at all
    checkpoints = {info.step: info for info in list_checkpoints(root)}
    best = _best_by_reward(checkpoints, scores) or _best_by_loss(checkpoints, run)
    if best is None and step == "best":
        raise UsageError(
            f"Which checkpoint of {run} is the best is not known: none was evaluated. Choose --step last or "
            "a number; the next run knows it with an [eval] table (or, in sft, data.val_path)."
        )
    return best or Choice(info=newest, reason="the newest checkpoint; none was evaluated")


def _best_by_reward(checkpoints: Mapping[int, CheckpointInfo], scores: Sequence[Score]) -> Choice | None:
    best = best_by_reward(checkpoints.values(), scores)
    if best is None:
        return None
    environments = ", ".join(score.environment for score in best.scores)
    reason = (
        f"the best of {best.of} evaluated checkpoints by mean reward "
        f"({best.mean_reward:.4f} over {environments})"
    )
    return Choice(info=best.info, reason=reason)


def _best_by_loss(checkpoints: Mapping[int, CheckpointInfo], run: Path) -> Choice | None:
    measured = read_run(run / "metrics.jsonl").values("validation/val_loss")
    losses = {step: loss for step, loss in measured.items() if step in checkpoints}
    if not losses:
        return None
    best = min(losses, key=lambda step: (losses[step], -step))
    reason = f"the best of {len(losses)} measured checkpoints by validation loss ({losses[best]:.4f})"
    return Choice(info=checkpoints[best], reason=reason)
