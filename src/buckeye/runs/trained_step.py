"""Tokens that one step was trained on, and the rollout of each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.transport.batches import Batch, TrainedBatch, read_trained_batch

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedStep:
    """Batch of a step, with the trainer's results.

    `logprobs` f32[T] has the trainer's log-prob of each of the T tokens of all samples, in order. It is NaN
    for context, and for samples that the trainer left out of the forward pass. `starts` i64[N + 1] has the
    index of the first token of each of the N samples, and then T. `origins` has (group, rollout, segment,
    truncated) per sample. It is empty if the rollouts of the step are unknown or from another attempt.
    """

    batch: Batch
    record: Mapping[str, Any]
    logprobs: Array
    starts: Array
    origins: Sequence[tuple[int, int, int, bool]]

    def column(self, name: str) -> Array:
        """Return one array of `Sample`, concatenated over all samples."""
        return np.concatenate([getattr(sample, name) for sample in self.batch.samples] or [np.empty(0)])

    @property
    def sample_numbers(self) -> Array:
        """Sample index of each token, i32[T]."""
        return np.repeat(np.arange(len(self.starts) - 1, dtype=np.int32), np.diff(self.starts))

    @property
    def positions(self) -> Array:
        """Position of each token in its sample, i32[T]."""
        return (np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], np.diff(self.starts))).astype(
            np.int32
        )

    def turns(self) -> Array:
        """Return the turn of each token in its rollout, i32[T]; -1 for context, which separates turns."""
        mask, begins = self.column("loss_mask"), self.positions == 0
        starts_turn = mask & ~np.concatenate([[False], mask[:-1] & ~begins[1:]])
        number = np.cumsum(starts_turn)
        rollouts = [origin[:2] for origin in self.origins] or [(at, 0) for at in range(len(self.starts) - 1)]
        first = [at for at in range(len(rollouts)) if not at or rollouts[at] != rollouts[at - 1]]
        before = np.zeros(len(rollouts), np.int64)
        for at, until in zip(first, [*first[1:], len(rollouts)], strict=True):
            start = int(self.starts[at])
            before[at:until] = number[start] - starts_turn[start] if start < len(number) else 0
        turns = number - np.repeat(before, np.diff(self.starts)) - 1
        return np.where(mask, turns, -1).astype(np.int32)

    def token_columns(self) -> Mapping[str, Any]:
        """Return the columns of all tokens of all samples, by name.

        A nullable column is a pair: the values, and a bool array that is True for nulls.
        """
        mask, computed = self.column("loss_mask"), ~np.isnan(self.logprobs)
        return {
            "step": np.full(len(mask), self.batch.step, np.int32),
            "sample": self.sample_numbers,
            "position": self.positions,
            "token_id": self.column("token_ids"),
            "trained": mask & computed,
            "reason": np.where(~mask, "context", np.where(computed, "", "no_advantage")),
            "sampler_logprob": (self.column("logprobs"), ~mask),
            "trainer_logprob": (self.logprobs, ~computed),
            "advantage": (self.column("advantages"), ~mask),
            "version": (self.column("versions"), ~mask),
            "turn": self.turns(),
        }


def read_trained_step(run: Path, step: int, rollouts: Sequence[tuple[int, int, int, int]]) -> TrainedStep:
    """Return a trained step of a run.

    `rollouts` has (group, number, segments, truncated) of the trained rollouts, in file order. Raise
    `TransportError` if the batch was not kept or is damaged.
    """
    batch, trained = read_trained_batch(run / "trained", step)
    starts = np.concatenate([[0], np.cumsum([len(sample.token_ids) for sample in batch.samples])])
    logprobs = np.full(int(starts[-1]), np.nan, np.float32)
    _put(batch, trained, starts, logprobs)
    origins = [
        (group, number, segment, bool(truncated))
        for group, number, segments, truncated in rollouts
        for segment in range(segments)
    ]
    return TrainedStep(
        batch=batch,
        record=trained.record,
        logprobs=logprobs,
        starts=starts.astype(np.int64),
        origins=origins if len(origins) == len(batch.samples) else (),
    )


def _put(batch: Batch, trained: TrainedBatch, starts: Array, logprobs: Array) -> None:
    """Write the trainer's log-probs to the positions of their tokens in `logprobs`."""
    at = 0
    for number in trained.samples:
        places = starts[number] + np.flatnonzero(batch.samples[number].loss_mask)
        part = trained.logprobs[at : at + len(places)]
        logprobs[places[: len(part)]] = part
        at += len(places)
