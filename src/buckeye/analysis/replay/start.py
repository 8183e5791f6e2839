"""Starts of a replay: the checkpoints and weights of a run, and the batches that it has kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from buckeye.base.storage import step_directories, step_directory
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import TransportError, UsageError
from buckeye.transport.batches import TrainedBatch, read_trained_batch
from buckeye.transport.checkpoint import CheckpointInfo, list_checkpoints, verify_checkpoint
from buckeye.transport.weights import read_weights_manifest

Stage = Literal["log-probs", "loss", "gradient", "weights"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""Stages of a step, in the order of computation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayStart:
    """Start of a replay: the state of the trainer before `step`, from `checkpoint` or the model at `path`."""

    step: int
    path: Path
    checkpoint: CheckpointInfo | None = None


def require_kept(run: Path, step: int) -> TrainedBatch:
    """Return the record of a trained step. Raise `UsageError` if its batch was not kept."""
    try:
        return read_trained_batch(run / "trained", step)[1]
    except TransportError as error:
        stored = _stored_steps(run / "trained")
        hint = f"{error.hint}. {stored}" if error.hint else stored
        raise UsageError(error.message, code=error.code, at=error.at, hint=hint) from error


def _stored_steps(kept: Path) -> str:
    steps = list(step_directories(kept))
    if not steps:
        return "No batch is stored: see the setting trainer.trained"
    return f"Stored batches: steps {steps[0]} to {steps[-1]}"


def start_of(run: Path, config: TrainerConfig, step: int, *, until: Stage) -> ReplayStart:
    """Return the nearest start: a checkpoint, or the initial model of the run.

    If `until` is not "weights" and the step has one update, prefer the published weights of the step. Later
    updates need the optimizer's state. Raise `UsageError` if no start exists.
    """
    if until != "weights" and (alone := _start_of_one_update(run, config, step)) is not None:
        return alone
    start = find_start(run, config, step)
    if start.checkpoint is not None:
        verify_checkpoint(start.checkpoint)
    return start


def find_start(run: Path, config: TrainerConfig, step: int) -> ReplayStart:
    """Return the start that recomputes whole steps up to `step`, unverified.

    Raise `UsageError`, with the steps that can be replayed, if no start exists.
    """
    found, kept = starts(run, config), step_directories(run / "trained")
    start = nearest(found, kept, step)
    if start is not None:
        return start
    possible = [number for number in kept if nearest(found, kept, number) is not None]
    steps = f"{possible[0]} to {possible[-1]}" if possible else "none"
    alone = _start_of_one_update(run, config, step)
    gradient = f"; up to the gradient: --until gradient (needs only weights/step_{step})"
    raise UsageError(
        f"cannot replay step {step}: {run} has no earlier checkpoint with all batches after it",
        code="BK-RUN-NO-DATA",
        hint=f"steps that can be replayed: {steps}{gradient if alone is not None else ''}",
    )


def _start_of_one_update(run: Path, config: TrainerConfig, step: int) -> ReplayStart | None:
    return published(run, step) if config.mini_batches * config.epochs_per_batch == 1 else None


def published(run: Path, step: int) -> ReplayStart | None:
    """Return the published weights of a step, or None. They allow a replay of the step up to its gradient."""
    path = step_directory(run / "weights", step)
    if not (path / "config.json").is_file():
        return None
    read_weights_manifest(path)
    return ReplayStart(step=step, path=path)


def starts(run: Path, config: TrainerConfig) -> list[ReplayStart]:
    """Return the starts that can recompute whole steps, by step: the initial model, and the checkpoints."""
    model = Path(config.model.name)
    first = [ReplayStart(step=0, path=model)] if model.is_dir() else []
    checkpoints = list_checkpoints(run / "checkpoints")
    return [*first, *(ReplayStart(step=info.step, path=info.path, checkpoint=info) for info in checkpoints)]


def nearest(found: Sequence[ReplayStart], kept: Collection[int], step: int) -> ReplayStart | None:
    """Return the last start at or before a step, with all batches in between in `kept`, or None."""
    return next(
        (
            start
            for start in reversed(found)
            if start.step <= step and all(number in kept for number in range(start.step, step))
        ),
        None,
    )
