"""Replay a training step: recompute it from its recorded batch, and find the first difference.

The replay runs the training loop in a separate folder. It starts from a checkpoint at or before the step, and
trains on every batch in between. Equal code on an equal machine, with an equal number of threads, gives
bit-identical results.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from buckeye.analysis.replay.start import (
    STAGES,
    ReplayStart,
    Stage,
    require_kept,
    start_of,
    starts,
)
from buckeye.base.process import RunIdentity, StopFlag
from buckeye.base.storage import step_directories
from buckeye.config.trainer import TrainedBatchesConfig, TrainerConfig
from buckeye.trainer.rl import RLTrainer, load_supervised
from buckeye.trainer.setup import build_learner, trainer_process
from buckeye.transport.batches import Batch, TrainedBatch, read_trained_batch
from buckeye.transport.checkpoint import verify_checkpoint

_MACHINE = ("torch", "device", "threads", "ranks")
_CIRCUMSTANCES = ("buckeye", "supervised", *_MACHINE)
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
"""Rounding tolerance between two machines. It is in nats for log-probs, and relative for norms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageComparison:
    """Comparison of one stage of a step with its record.

    `difference` is 0.0 if the values are bit-identical, and None if the size of the difference is unknown.
    `where` is the location of the largest difference.
    """

    step: int
    stage: Stage
    recorded: str
    replayed: str
    difference: float | None
    where: str = ""

    @property
    def is_identical(self) -> bool:
        """True if the recorded and the replayed value are bit-identical."""
        return self.difference == 0.0

    def within(self, tolerance: float) -> bool:
        """Return True if the difference is within rounding. Weights always are, because only hashes exist."""
        return self.stage == "weights" or (self.difference is not None and self.difference <= tolerance)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Result of a replay.

    `tolerance` is the rounding tolerance of each value. `changed` has the versions and hardware that differ,
    as (recorded, current).
    """

    step: int
    start: ReplayStart
    tolerance: float
    changed: Mapping[str, tuple[Any, Any]]
    comparisons: Sequence[StageComparison]

    @property
    def first_difference(self) -> StageComparison | None:
        """First stage that is not bit-identical."""
        return next((one for one in self.comparisons if not one.is_identical), None)

    @property
    def within_tolerance(self) -> bool:
        """True if no value differs by more than rounding."""
        return all(one.within(self.tolerance) for one in self.comparisons)

    @property
    def first_unexplained(self) -> StageComparison | None:
        """First difference. On a different machine, the first difference above rounding."""
        rounded = bool(self.changed.keys() & {*_MACHINE})
        found = (one for one in self.comparisons if not one.is_identical)
        return next((one for one in found if not (rounded and one.within(self.tolerance))), None)


def replay_step(
    run: Path, config: TrainerConfig, step: int, *, until: Stage, device: str | None, scratch: Path
) -> Replay:
    """Recompute step `step` (from 0) of the run in `run`, up to the stage `until`.

    `config` is the trainer's configuration, `device` can override its device, and `scratch` is an empty
    folder. Raise `UsageError` if the run did not keep the batch of the step, or a state to start from.
    """
    require_kept(run, step)
    start = start_of(run, config, step, until=until)
    return chain(run, config, start, range(start.step, step + 1), until=until, device=device, scratch=scratch)


def replay_all(
    run: Path, config: TrainerConfig, *, device: str | None, scratch: Path, tell: Callable[[int], None]
) -> Replay:
    """Recompute all steps from the first possible start to the first difference or the first missing batch.

    `tell` is called with each step before it runs. Raise `UsageError` if no step can be recomputed.
    """
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
    start: ReplayStart,
    steps: Iterable[int],
    *,
    until: Stage,
    device: str | None,
    scratch: Path,
    tell: Callable[[int], None] = lambda step: None,
    to_the_end: bool = True,
) -> Replay:
    """Recompute one or more steps, and call `tell` before each.

    Without `to_the_end`, stop after the first step that differs. The result is for the last step computed.
    """
    kept, comparisons = run / "trained", list[StageComparison]()
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
    records = [read_trained_batch(folder, step)[1].record for folder in (then, now)]
    found = {name: (records[0].get(name), records[1].get(name)) for name in _CIRCUMSTANCES}
    return {name: (before, after) for name, (before, after) in found.items() if before != after}


@contextmanager
def trainer_in(
    scratch: Path, config: TrainerConfig, start: ReplayStart, *, device: str | None = None
) -> Iterator[RLTrainer]:
    """Yield the run's trainer in the state of `start`. It writes only to the empty folder `scratch`."""
    model = config.model.name if start.checkpoint else str(start.path)
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"device": device or config.model.device, "name": model}),
            "output_dir": scratch,
            # the run has logged the warnings already, and stdout may be JSON
            "log": config.log.model_copy(update={"level": "error"}),
            "trained": TrainedBatchesConfig(keep=1, max_bytes=sys.maxsize),
        }
    )
    with trainer_process(config, "replay") as ranks:
        chats = load_supervised(config, None)
        learner = build_learner(config, ranks, start.checkpoint, max_steps=config.max_steps)
        learner.progress = replace(learner.progress, step=start.step)
        trainer = RLTrainer(config, learner, StopFlag(), RunIdentity(run_id="replay", attempt=1), chats)
        with trainer.output:
            yield trainer


def _again(trainer: RLTrainer, kept: Path, step: int) -> Iterator[StageComparison]:
    batch, recorded = read_trained_batch(kept, step)
    then = recorded.record
    torch.set_num_threads(then["threads"])  # a resume may change threads and micro-batches
    trainer.learner.micro_batch_size.tokens = int(then["values"]["micro_batch_tokens"])
    if "data_position" in then:  # published weights have no position
        progress = trainer.learner.progress
        trainer.learner.progress = replace(progress, data_position=then["data_position"])
    trainer.train(batch)
    trainer.output.wait_published()
    replayed = read_trained_batch(trainer.config.output_dir / "trained", step)[1]
    now = replayed.record
    yield _of_logprobs(batch, recorded, replayed)
    yield _of_figures(step, "loss", then["values"].get("loss"), now["values"].get("loss"))
    yield _of_figures(step, "gradient", then["values"].get("grad_norm"), now["values"].get("grad_norm"))
    yield StageComparison(
        step=step,
        stage="weights",
        recorded=then["weights"],
        replayed=now["weights"],
        difference=0.0 if then["weights"] == now["weights"] else None,
    )


def _of_logprobs(batch: Batch, recorded: TrainedBatch, replayed: TrainedBatch) -> StageComparison:
    """Compare the log-probs. Return the largest difference and its token."""
    then, now = recorded.logprobs, replayed.logprobs
    alike = then.shape == now.shape and np.array_equal(recorded.samples, replayed.samples)
    difference, where = None, ""
    if alike:
        apart = np.nan_to_num(np.abs(then - now), nan=math.inf)
        apart[np.isnan(then) & np.isnan(now)] = 0.0
        difference = float(apart.max(initial=0.0))
        where = _place(batch, recorded.samples, int(apart.argmax())) if difference else ""
    return StageComparison(
        step=batch.step,
        stage="log-probs",
        recorded=f"{len(then)} tokens",
        replayed=f"{len(now)} tokens",
        difference=difference,
        where=where,
    )


def _place(batch: Batch, samples: Iterable[int], token: int) -> str:
    """Return the location of the `token`-th trained token of these samples, as text."""
    for number in samples:
        places = np.flatnonzero(batch.samples[number].loss_mask)
        if token < len(places):
            return f"sample {number}, token {places[token]}"
        token -= len(places)
    raise AssertionError("the samples have fewer trained tokens")


def _of_figures(step: int, stage: Stage, then: float | None, now: float | None) -> StageComparison:
    """Compare a loss (absolute) or a norm (relative). A value of None was not finite."""
    difference: float | None = 0.0 if then == now else None
    if then is not None and now is not None and then != now:
        difference = abs(then - now) / (1.0 if stage == "loss" else max(abs(then), abs(now)))
    return StageComparison(
        step=step, stage=stage, recorded=_figure(then), replayed=_figure(now), difference=difference
    )


def _figure(value: float | None) -> str:
    return "nan" if value is None else repr(value)
