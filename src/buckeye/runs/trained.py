"""What was trained on in one step, token by token, and which rollout each sample is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.transport.batches import Batch, TrainedBatch, read_trained

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedStep:
    """The batch of a step, and what the trainer made of it.

    `logprobs` f32[T] are the trainer's of all T tokens of all samples, one after the other, NaN where there
    is none: of context, and of samples that did not go through the model. `starts` i64[N + 1] is where each
    of the N samples begins in them. `origins` has (group, rollout, segment, cut off) of each; it is empty
    where the rollouts of the step are not known, or are of another attempt.
    """

    batch: Batch
    record: Mapping[str, Any]
    logprobs: Array
    starts: Array
    origins: Sequence[tuple[int, int, int, bool]]

    def column(self, name: str) -> Array:
        """One of the arrays of `Sample`, of all samples one after the other."""
        return np.concatenate([getattr(sample, name) for sample in self.batch.samples] or [np.empty(0)])

    @property
    def sample_numbers(self) -> Array:
        """i32[T], which sample a token is of."""
        return np.repeat(np.arange(len(self.starts) - 1, dtype=np.int32), np.diff(self.starts))

    @property
    def positions(self) -> Array:
        """i32[T], where in its sample a token is."""
        return (np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], np.diff(self.starts))).astype(
            np.int32
        )

    def turns(self) -> Array:
        """i32[T], which of the rollout's turns wrote a token; -1 for context. Turns are told by the context
        between them."""
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
        """Return a column for each figure of the tokens of all samples. A column with nulls is a pair: the
        values, and a bool array that is True where there is none."""
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


def read_step(run: Path, step: int, rollouts: Sequence[tuple[int, int, int, int]]) -> TrainedStep:
    """The step of a run. `rollouts` are (group, number, segments, truncated) of those that were trained on,
    in the order of their file. Raises `TransportError`."""
    batch, trained = read_trained(run / "trained", step)
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
    """Put the trainer's log-probs where their tokens are."""
    at = 0
    for number in trained.samples:
        places = starts[number] + np.flatnonzero(batch.samples[number].loss_mask)
        part = trained.logprobs[at : at + len(places)]
        logprobs[places[: len(part)]] = part
        at += len(places)
