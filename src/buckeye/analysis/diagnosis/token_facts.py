"""Trained tokens of some steps as columns, and their changes after equal text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.analysis.diagnosis.statistics import centered, rms
from buckeye.monitor.learning_findings import RANDOM_LOGPROB
from buckeye.runs.trained_step import TrainedStep

Array = npt.NDArray[Any]

_MOST_TOKENS = 60_000
"""Maximum number of tokens per step, from the first samples, as whole samples."""
_MIN_TOKENS = 40
_UNCERTAIN = -0.5  # nats
_TRAINED = -2.0  # nats


@dataclass(frozen=True, eq=False)
class TokenFacts:
    """Columns over all M tokens in the loss mask.

    `step`; `sample`, unique over all steps; `key`, equal for equal tokens after equal text; `context`, equal
    for equal preceding text; `sampler` and `trainer` log-probs (NaN if not computed with the weights before
    the step); `version`.
    """

    step: Array
    sample: Array
    key: Array
    context: Array
    sampler: Array
    trainer: Array
    version: Array

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def fresh(self) -> Array:
        """Mask bool[M] of tokens with trainer log-probs from the weights that sampled them."""
        return (self.version == self.step) & np.isfinite(self.trainer)

    @cached_property
    def logprob_gap(self) -> Array:
        """Sampler minus trainer log-prob, f64[M]."""
        return self.sampler - self.trainer

    def shifted_by(self, tolerance: float) -> tuple[int, float, float] | None:
        """Return the shift that fits the trainer's log-probs to the sampler's: (places, gap, shifted gap).

        None if they are within ten times `tolerance` nats, or no shift explains the difference.
        """
        fresh, gap = self.fresh, rms(self.logprob_gap[self.fresh])
        if fresh.sum() < _MIN_TOKENS or not gap > 10 * tolerance:
            return None
        beside = fresh[1:] & fresh[:-1] & (self.sample[1:] == self.sample[:-1])
        shifts = {
            1: rms((self.sampler[:-1] - self.trainer[1:])[beside]),
            -1: rms((self.sampler[1:] - self.trainer[:-1])[beside]),
        }
        place, least = min(shifts.items(), key=lambda item: item[1])
        return (place, gap, least) if least < gap / 10 else None

    def is_misplaced(self, tolerance: float) -> bool:
        """Return True if the loss mask has unsampled tokens, or log-probs that belong to another token."""
        has_unsampled = bool(len(self) and self.unsampled.mean() > 0.01)
        return has_unsampled or self.shifted_by(tolerance) is not None or self.is_random_to_trainer

    @cached_property
    def is_random_to_trainer(self) -> bool:
        """True if a trained model sampled the tokens, but they look random to the trainer.

        Only tokens of the initial weights are compared. Wrong inputs change their log-probs less.
        """
        first = self.fresh & (self.version == 0)
        enough = first.sum() >= _MIN_TOKENS
        return bool(
            enough and self.sampler[first].mean() > _TRAINED and self.trainer[first].mean() < RANDOM_LOGPROB
        )

    @cached_property
    def unsampled(self) -> Array:
        """Mask bool[M] of tokens that were not sampled.

        They have no version, or a sampler log-prob of 0 where the trainer is far from certain.
        """
        return (self.version < 0) | ((self.sampler == 0.0) & (self.trainer < _UNCERTAIN))

    def initial_logprob_gap(self) -> Array:
        """Return sampler minus trainer log-probs of fresh tokens from the initial weights (version 0)."""
        return self.logprob_gap[self.fresh & (self.version == 0)]

    def centered_logprobs(self, chosen: Array) -> tuple[Array, Array]:
        """Return the sampler's and the trainer's log-probs of the chosen tokens, centered per context.

        The mean over tokens after equal text at one version is subtracted, so the normalization of a
        distribution cancels. Contexts with a single token are left out.
        """
        rows = np.flatnonzero(chosen)
        _, places = np.unique(np.stack([self.context[rows], self.version[rows]]), axis=1, return_inverse=True)
        places = places.reshape(-1)
        kept = np.bincount(places)[places] > 1
        sampler, trainer = (centered(values[rows], places)[kept] for values in (self.sampler, self.trainer))
        return sampler, trainer

    @cached_property
    def changes(self) -> tuple[Array, Array, Array]:
        """Changes from the first to the last version, of tokens that recur after equal text in fresh batches.

        The log-prob changes of sampler and trainer, and the sample of the later token.
        """
        return self._changes(self.fresh)

    @cached_property
    def changes_at_any_age(self) -> tuple[Array, Array, Array]:
        """Like `changes`, but with tokens of older weights too. The trainer is then ahead of the sampler."""
        return self._changes((self.version >= 0) & np.isfinite(self.trainer))

    def _changes(self, chosen: Array) -> tuple[Array, Array, Array]:
        rows = np.flatnonzero(chosen)
        rows = rows[np.lexsort((self.version[rows], self.key[rows]))]
        begins = np.flatnonzero(np.diff(self.key[rows], prepend=self.key[rows][:1] - 1))
        first, last = rows[begins], rows[np.r_[begins[1:], len(rows)] - 1] if len(rows) else rows
        moved = self.version[last] > self.version[first]
        first, last = first[moved], last[moved]
        changes = (values[last] - values[first] for values in (self.sampler, self.trainer))
        return *changes, self.sample[last]  # type: ignore[return-value]


def token_facts(batches: Sequence[TrainedStep]) -> TokenFacts:
    """Return the trained tokens of batches as columns."""
    parts = [(np.empty(0, int),) * 4 + (np.empty(0),) * 2 + (np.empty(0, int),)]
    for batch in batches:
        first = batch.record.get("first_update")
        updated = set(range(len(batch.batch.samples))).difference(first) if first is not None else set[int]()
        for number, sample in enumerate(batch.batch.samples):
            begin, end = batch.starts[number : number + 2]
            if number and end > _MOST_TOKENS:
                break
            mask = sample.loss_mask
            keys = _keys(sample.token_ids.tolist())
            parts.append(
                (
                    np.full(int(mask.sum()), batch.batch.step),
                    np.full(int(mask.sum()), len(parts)),
                    keys[1:][mask],
                    keys[:-1][mask],
                    sample.logprobs[mask].astype(float),
                    np.where(number in updated, np.nan, batch.logprobs[begin:end][mask].astype(float)),
                    sample.versions[mask],
                )
            )
    return TokenFacts(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _keys(ids: Sequence[int]) -> Array:
    """Return hashes i64[T + 1] of the first 0 to T ids."""
    return np.fromiter(accumulate(ids, lambda seen, token: hash((seen, token)), initial=0), np.int64)
