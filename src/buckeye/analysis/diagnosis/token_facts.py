"""Trained tokens of some steps as columns, and their changes after equal text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.analysis.diagnosis.statistics import rms
from buckeye.runs.trained_step import TrainedStep

Array = npt.NDArray[Any]

_MOST_TOKENS = 60_000
"""Maximum number of tokens per step, from the first samples, as whole samples."""
_MIN_TOKENS = 40
_UNCERTAIN = -0.5  # nats
_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """Log-prob changes of tokens that were sampled after equal text at two versions of the weights.

    `sampler` and `trainer` are the changes of their log-probs. `sample` is the rollout of the later token.
    """

    sampler: Array
    trainer: Array
    sample: Array

    def __len__(self) -> int:
        return len(self.sampler)


@dataclass(frozen=True, eq=False)
class TokenFacts:
    """Columns over all M tokens in the loss mask.

    `step`; `sample`, unique over all steps; `key`, equal for equal tokens after equal text; `context`, equal
    for equal preceding text; `sampler` and `trainer` log-probs (NaN if not computed); `advantage`; `version`.
    """

    step: Array
    sample: Array
    key: Array
    context: Array
    sampler: Array
    trainer: Array
    advantage: Array
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
        return bool(len(self) and self.unsampled.mean() > 0.01) or self.shifted_by(tolerance) is not None

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
        _, places = np.unique(
            np.stack([self.context[rows], self.version[rows].astype(np.uint64)]), axis=1, return_inverse=True
        )
        places = places.reshape(-1)
        counts = np.bincount(places)
        kept = counts[places] > 1
        return tuple(  # type: ignore[return-value]
            (values[rows] - (np.bincount(places, values[rows]) / counts)[places])[kept]
            for values in (self.sampler, self.trainer)
        )

    @cached_property
    def changes(self) -> Change:
        """Changes from the first to the last version.

        Covers tokens that recur after equal text in fresh batches.
        """
        rows = np.flatnonzero(self.fresh)
        rows = rows[np.lexsort((self.version[rows], self.key[rows]))]
        keys = self.key[rows]
        begins = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]]) if len(keys) else np.empty(0, int)
        ends = np.r_[begins[1:], len(keys)].astype(int) - 1
        first, last = rows[begins], rows[ends] if len(keys) else rows[begins]
        moved = self.version[last] > self.version[first]
        first, last = first[moved], last[moved]
        return Change(
            sampler=self.sampler[last] - self.sampler[first],
            trainer=self.trainer[last] - self.trainer[first],
            sample=self.sample[last],
        )


def token_facts(batches: Sequence[TrainedStep]) -> TokenFacts:
    """Return the trained tokens of batches as columns."""
    parts, samples = list[tuple[Array, ...]](), 0
    for batch in batches:
        whole = int(np.searchsorted(batch.starts, _MOST_TOKENS, side="right")) - 1
        until = int(batch.starts[max(1, whole)]) if len(batch.starts) > 1 else 0
        mask = batch.column("loss_mask")[:until].astype(bool)
        numbers = batch.sample_numbers[:until]
        parts.append(
            (
                np.full(int(mask.sum()), batch.batch.step),
                numbers[mask] + samples,
                *(column[mask] for column in _keys(batch, until)),
                batch.column("logprobs")[:until][mask].astype(float),
                batch.logprobs[:until][mask].astype(float),
                batch.column("advantages")[:until][mask].astype(float),
                batch.column("versions")[:until][mask],
            )
        )
        samples += len(batch.starts)
    if not parts:
        return TokenFacts(*(np.empty(0) for _ in range(8)))
    return TokenFacts(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _keys(batch: TrainedStep, until: int) -> tuple[Array, Array]:
    """Return u64 hashes of the ids up to each token, with and without it: sums of mixed ids and positions."""
    ids = batch.column("token_ids")[:until].astype(np.uint64)
    places = batch.positions[:until].astype(np.uint64)
    mixed = (ids + np.uint64(1)) * np.uint64(_BASE) + places * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(29)
    sums = np.cumsum(mixed, dtype=np.uint64)
    starts = batch.starts[:-1][batch.starts[:-1] < until]
    before = np.where(starts > 0, sums[np.maximum(starts, 1) - 1], np.uint64(0))
    keys = sums - before[batch.sample_numbers[:until]]
    return keys, keys - mixed
