"""A step of a run, computed again from the batch that it was trained on: is the outcome the same, and where
does it first differ?

It runs the trainer's own loop in a folder of its own, from a checkpoint at or before the step, through every
batch in between. On the same kind of machine, with as many threads, the same code computes the same
to the last bit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from buckeye.base.process import RunIdentity, StopFlag
from buckeye.base.storage import step_directories, step_directory
from buckeye.config.trainer import TrainedBatchesConfig, TrainerConfig
from buckeye.errors import TransportError, UsageError
from buckeye.trainer.rl import RLTrainer
from buckeye.trainer.setup import build_learner, trainer_process
from buckeye.transport.batches import Batch, TrainedBatch, read_trained
from buckeye.transport.checkpoint import CheckpointInfo, list_checkpoints, verify_checkpoint
from buckeye.transport.weights import read_weights_manifest

Stage = Literal["log-probs", "loss", "gradient", "weights"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""The stages of a step, in the order in which they are computed."""

_MACHINE = ("torch", "device", "threads", "ranks")
_CIRCUMSTANCES = ("buckeye", *_MACHINE)
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
"""How far log-probs of two machines may be apart by rounding, in nats; norms by as much of themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A stage of a step, then and now. `difference` is 0.0 if they are the same to the last bit, None if they
    differ and that has no size; `where` is the place of the largest."""

    step: int
    stage: Stage
    recorded: str
    replayed: str
    difference: float | None
    where: str = ""

    @property
    def same(self) -> bool:
        """Whether both are the same to the last bit."""
        return self.difference == 0.0

    def within(self, tolerance: float) -> bool:
        """Whether it differs by no more than rounding may bring about. Weights have no size to compare."""
        return self.stage == "weights" or (self.difference is not None and self.difference <= tolerance)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a replay begins: before `step`, with what is in `path`, which is a `checkpoint`, or a model."""

    step: int
    path: Path
    checkpoint: CheckpointInfo | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What came of it. `tolerance` is what rounding may make of a figure; `changed` is what was recorded of
    the circumstances and is otherwise now."""

    step: int
    start: Start
    tolerance: float
    changed: Mapping[str, tuple[Any, Any]]
    comparisons: Sequence[Comparison]

    @property
    def first_difference(self) -> Comparison | None:
        """The first stage that is not the same to the last bit."""
        return next((one for one in self.comparisons if not one.same), None)

    @property
    def within_tolerance(self) -> bool:
        """Whether no figure differs by more than rounding may make of it."""
        return all(one.within(self.tolerance) for one in self.comparisons)

    @property
    def first_unexplained(self) -> Comparison | None:
        """The first difference; on another kind of machine the first that is more than rounding."""
        rounded = bool(self.changed.keys() & {*_MACHINE})
        found = (one for one in self.comparisons if not one.same)
        return next((one for one in found if not (rounded and one.within(self.tolerance))), None)


def replay_step(
    run: Path, config: TrainerConfig, step: int, *, until: Stage, device: str | None, scratch: Path
) -> Replay:
    """Compute step `step` (counted from 0) of the run in `run` again, as far as `until`, in the empty folder
    `scratch`. `config` is the trainer's; `device` may be another one.

    Raises UsageError if its batch, or what it needs to begin from, was not kept.
    """
    require_kept(run, step)
    start = start_of(run, config, step, until=until)
    return chain(run, config, start, range(start.step, step + 1), until=until, device=device, scratch=scratch)


def replay_all(
    run: Path, config: TrainerConfig, *, device: str | None, scratch: Path, tell: Callable[[int], None]
) -> Replay:
    """Compute every step again, from the first place to begin from up to the first step that differs, or of
    which no batch was kept. `tell` is told each before it. Raises UsageError if there is none."""
    kept = step_directories(run / "trained")
    start = next((one for one in starts(run, config) if one.step in kept), None)
    if start is None:
        require_kept(run, next(iter(kept), 0))
        start = start_of(run, config, max(kept), until="weights")
    if start.checkpoint is not None:
        verify_checkpoint(start.checkpoint)
    return chain(
        run,
        config,
        start,
        takewhile(kept.__contains__, count(start.step)),
        until="weights",
        device=device,
        scratch=scratch,
        tell=tell,
        to_the_end=False,
    )


def chain(
    run: Path,
    config: TrainerConfig,
    start: Start,
    steps: Iterable[int],
    *,
    until: Stage,
    device: str | None,
    scratch: Path,
    tell: Callable[[int], None] = lambda step: None,
    to_the_end: bool = True,
) -> Replay:
    """Compute these steps, at least one, from the start on, and `tell` each before it. Without `to_the_end`
    stop after the first that differs. The replay is of the last step that was computed."""
    kept, comparisons = run / "trained", list[Comparison]()
    with trainer_in(scratch, config, start, device=device) as trainer:
        tolerance = _TOLERANCES[str(trainer.learner.policy.compute_dtype).removeprefix("torch.")]
        for step in steps:
            tell(step)
            made = _again(trainer, kept, step)
            comparisons += [one for one in made if STAGES.index(one.stage) <= STAGES.index(until)]
            changed = _changed(kept, scratch / "trained", step)
            found = Replay(
                step=step, start=start, tolerance=tolerance, changed=changed, comparisons=[*comparisons]
            )
            if not to_the_end and found.first_unexplained is not None:
                break
    return found


def _changed(then: Path, now: Path, step: int) -> dict[str, tuple[Any, Any]]:
    records = [read_trained(folder, step)[1].record for folder in (then, now)]
    found = {name: (records[0][name], records[1][name]) for name in _CIRCUMSTANCES}
    return {name: (before, after) for name, (before, after) in found.items() if before != after}


@contextmanager
def trainer_in(
    scratch: Path, config: TrainerConfig, start: Start, *, device: str | None = None
) -> Iterator[RLTrainer]:
    """The run's trainer as it was at the start, which writes into the empty folder `scratch` alone."""
    config = _in_scratch(config, scratch, device=device, model=None if start.checkpoint else start.path)
    with trainer_process(config, "replay") as ranks:
        learner = build_learner(config, ranks, start.checkpoint, max_steps=config.max_steps)
        learner.progress = replace(learner.progress, step=start.step)
        trainer = RLTrainer(config, learner, StopFlag(), RunIdentity(run_id="replay", attempt=1))
        with trainer.output:
            yield trainer


def require_kept(run: Path, step: int) -> TrainedBatch:
    """What came of a step. Raises UsageError if its batch was not kept."""
    try:
        return read_trained(run / "trained", step)[1]
    except TransportError as error:
        raise UsageError(f"{error} {_there(run / 'trained')}") from None


def _there(kept: Path) -> str:
    steps = list(step_directories(kept))
    if not steps:
        return "None is: see trainer.trained in the settings of the run."
    return f"There are those of steps {steps[0]} to {steps[-1]}."


def start_of(run: Path, config: TrainerConfig, step: int, *, until: Stage) -> Start:
    """The nearest place to begin from: a checkpoint, the model that the run began with, or, without new
    weights, those that were published. Raises UsageError where there is none."""
    if until != "weights" and (alone := published(run, step)) is not None:
        return alone
    start = nearest(starts(run, config), set(step_directories(run / "trained")), step)
    if start is not None:
        if start.checkpoint is not None:
            verify_checkpoint(start.checkpoint)
        return start
    raise UsageError(
        f"Step {step} cannot be computed again: {run} has no checkpoint at or before it from which on every "
        f"batch was kept. {_there(run / 'trained')} `--until gradient` needs weights/step_{step} alone."
    )


def published(run: Path, step: int) -> Start | None:
    """The weights of a step, from which it can be computed as far as its gradient."""
    path = step_directory(run / "weights", step)
    if not (path / "config.json").is_file():
        return None
    read_weights_manifest(path)
    return Start(step=step, path=path)


def starts(run: Path, config: TrainerConfig) -> list[Start]:
    """Where whole steps can be computed from, by step: the model that the run began with, and checkpoints."""
    model = Path(config.model.name)
    first = [Start(step=0, path=model)] if model.is_dir() else []
    checkpoints = list_checkpoints(run / "checkpoints")
    return [*first, *(Start(step=info.step, path=info.path, checkpoint=info) for info in checkpoints)]


def nearest(found: Sequence[Start], kept: Collection[int], step: int) -> Start | None:
    """The last of these starts from which on every batch up to a step was kept."""
    return next(
        (
            start
            for start in reversed(found)
            if start.step <= step and all(number in kept for number in range(start.step, step))
        ),
        None,
    )


def _in_scratch(
    config: TrainerConfig, scratch: Path, *, device: str | None, model: Path | None
) -> TrainerConfig:
    """The configuration of the replay: all that decides numbers as it was, all that is written elsewhere."""
    changed = {"device": device or config.model.device, "name": str(model or config.model.name)}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=changed),
            "output_dir": scratch,
            "log": config.log.model_copy(update={"file": False, "level": "warning"}),
            "trained": TrainedBatchesConfig(keep=1, max_bytes=sys.maxsize),
        }
    )


def _again(trainer: RLTrainer, kept: Path, step: int) -> Iterator[Comparison]:
    batch, recorded = read_trained(kept, step)
    then = recorded.record
    torch.set_num_threads(then["threads"])  # this and the next may be others since the run was resumed
    trainer.learner.micro_batch_size.tokens = int(then["values"]["micro_batch_tokens"])
    trainer.train(batch)
    replayed = read_trained(trainer.config.output_dir / "trained", step)[1]
    now = replayed.record
    yield _of_logprobs(batch, recorded, replayed)
    yield _of_figures(step, "loss", then["values"].get("loss"), now["values"].get("loss"))
    yield _of_figures(step, "gradient", then["values"].get("grad_norm"), now["values"].get("grad_norm"))
    yield Comparison(
        step=step,
        stage="weights",
        recorded=then["weights"],
        replayed=now["weights"],
        difference=0.0 if then["weights"] == now["weights"] else None,
    )


def _of_logprobs(batch: Batch, recorded: TrainedBatch, replayed: TrainedBatch) -> Comparison:
    """The largest difference of a log-prob, and which token of which sample has it."""
    then, now = recorded.logprobs, replayed.logprobs
    alike = then.shape == now.shape and np.array_equal(recorded.samples, replayed.samples)
    difference, where = None, ""
    if alike:
        apart = np.nan_to_num(np.abs(then - now), nan=math.inf)
        apart[np.isnan(then) & np.isnan(now)] = 0.0
        difference = float(apart.max(initial=0.0))
        where = _place(batch, recorded.samples, int(apart.argmax())) if difference else ""
    return Comparison(
        step=batch.step,
        stage="log-probs",
        recorded=f"{len(then)} tokens",
        replayed=f"{len(now)} tokens",
        difference=difference,
        where=where,
    )


def _place(batch: Batch, samples: Iterable[int], token: int) -> str:
    """Where the `token`-th trained token of these samples is."""
    for number in samples:
        places = np.flatnonzero(batch.samples[number].loss_mask)
        if token < len(places):
            return f"sample {number}, token {places[token]}"
        token -= len(places)
    raise AssertionError("there are fewer trained tokens")


def _of_figures(step: int, stage: Stage, then: float | None, now: float | None) -> Comparison:
    """A loss is compared as it is, a norm as a share of itself. One that was no finite number is None."""
    difference: float | None = 0.0 if then == now else None
    if then is not None and now is not None and then != now:
        difference = abs(then - now) / (1.0 if stage == "loss" else max(abs(then), abs(now)))
    return Comparison(
        step=step, stage=stage, recorded=_figure(then), replayed=_figure(now), difference=difference
    )


def _figure(value: float | None) -> str:
    return "nan" if value is None else repr(value)
