"""The trained tokens of some steps as columns, and how the same token after the same text changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.runs.trained import TrainedStep

Array = npt.NDArray[Any]

_MOST_TOKENS = 60_000
"""Of a step: whole samples, the first ones."""
_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """Of tokens that were sampled after the same text at two versions of the weights: by how much the
    sampler's log-prob and the trainer's changed between them, and which rollout's the later one is."""

    sampler: Array
    trainer: Array
    sample: Array

    def __len__(self) -> int:
        return len(self.sampler)


@dataclass(frozen=True, eq=False)
class TokenFacts:
    """Columns over all M tokens in the loss mask: `step`, `sample` (a number of its own over all steps),
    `key` (equal for the same token after the same text), `context` (equal for the same text before),
    `sampler` and `trainer` log-probs (nan where not computed), `advantage`, `version`."""

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
        """bool[M]: the trainer computed the log-prob with the very weights that had sampled the token."""
        return (self.version == self.step) & np.isfinite(self.trainer)

    @cached_property
    def apart(self) -> Array:
        """f64[M]: sampler less trainer."""
        return self.sampler - self.trainer

    def at_first(self) -> Array:
        """Sampler less trainer, of tokens of the weights that nothing was trained on yet."""
        return self.apart[self.fresh & (self.version == 0)]

    def beside(self, chosen: Array) -> tuple[Array, Array]:
        """The chosen tokens' log-probs, the sampler's and the trainer's, each less the mean of those that
        follow the same text at the same version: what does not depend on how a distribution is
        normalized. Texts that only one token follows are left out."""
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
        """Of each token that fresh batches of two steps have after the same text: from the first to the
        last."""
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
    """The tokens of batches."""
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
    """u64: a number for each token, the same for the same ids up to it: sums of id and place, mixed."""
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
