"""Division of a batch into mini-batches, each for one optimizer update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from buckeye.transport.batches import Batch, Sample


def mini_batches(batch: Batch, *, count: int, epochs: int, seed: int) -> Iterator[Batch]:
    """Yield `count` mini-batches for each of the `epochs`, in the order of the updates.

    The groups of the batch are divided at random into mini-batches whose numbers of groups differ by at most
    one. Each epoch divides them anew. A group is never split. If the batch has fewer groups, there is a
    mini-batch per group. The result depends only on the batch, its step and the arguments, so all ranks and a
    repeated step get the same mini-batches.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in batch.samples:
        groups.setdefault(sample.group, []).append(sample)
    members = list(groups.values())
    parts = max(1, min(count, len(members)))
    random = np.random.default_rng([seed % 2**64, batch.step])
    for _ in range(epochs):
        if parts == 1:
            yield batch
            continue
        for part in np.array_split(random.permutation(len(members)), parts):
            yield replace(batch, samples=_join(members, sorted(part.tolist())))


def _join(groups: Sequence[Sequence[Sample]], chosen: Sequence[int]) -> tuple[Sample, ...]:
    return tuple(sample for number in chosen for sample in groups[number])
