"""Samples into bins of bounded length, bins onto ranks of equal work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from buckeye.errors import TransportError
from buckeye.trainer.layout import Family, Tokens, families


@dataclass(frozen=True, slots=True)
class Bin:
    """Samples that are computed at once: their `indices`, their `tokens` with shared prefixes counted once,
    and an estimated `cost`, in tokens."""

    indices: tuple[int, ...]
    tokens: int
    cost: float


def plan_bins(token_ids: Sequence[Tokens], capacity: int, *, pair_cost: float = 0.0) -> list[Bin]:
    """Samples in bins of at most `capacity` tokens, by first-fit decreasing. Each is in exactly one bin.

    Samples that share a prefix stay together where that fits; otherwise they are split, each part with the
    prefix. FFD needs at most 11/9 of the optimal number of bins plus 6/9 (Dósa 2007). `pair_cost` is what a
    token costs for each token that it sees, relative to all else that it costs. A sample longer than
    `capacity` is a `TransportError`: whoever made the batch should have cut it.
    """
    lengths = [len(ids) for ids in token_ids]
    for index, length in enumerate(lengths):
        if length > capacity:
            raise TransportError(
                f"Sample {index} of the batch has {length} tokens, more than the trainer's seq_len = "
                f"{capacity}. Raise trainer.seq_len, or lower the orchestrator's."
            )
    parts = [part for family in families(token_ids) for part in _split(family, lengths, capacity)]
    tokens = [_tokens(part, lengths) for part in parts]
    return [
        Bin(
            indices=tuple(index for number in numbers for index in parts[number].members),
            tokens=sum(tokens[number] for number in numbers),
            cost=sum(_cost(parts[number], lengths, pair_cost) for number in numbers),
        )
        for numbers in pack(tokens, capacity)
    ]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices in bins of at most `capacity`, which no length exceeds, by first-fit decreasing."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = next((i for i, room in enumerate(free) if room >= lengths[index]), None)
        if slot is None:
            bins.append([index])
            free.append(capacity - lengths[index])
        else:
            bins[slot].append(index)
            free[slot] -= lengths[index]
    return bins


def distribute(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices of bins for each rank: the costliest bin first, always to the rank with the least work so far.

    The busiest rank gets at most 4/3 of the optimum (Graham 1969). Ranks may get no bin at all.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(load)
        shares[rank].append(index)
        heapq.heappush(load, (total + costs[index], rank))
    return shares


def _split(family: Family, lengths: Sequence[int], capacity: int) -> list[Family]:
    """Parts of a family that fit, each with the prefix."""
    suffixes = [lengths[m] - family.prefix for m in family.members]
    if family.prefix + sum(suffixes) <= capacity:
        return [family]
    packed = pack(suffixes, capacity - family.prefix)
    return [
        Family(tuple(family.members[i] for i in numbers), family.prefix if len(numbers) > 1 else 0)
        for numbers in packed
    ]


def _tokens(family: Family, lengths: Sequence[int]) -> int:
    return family.prefix + sum(lengths[m] - family.prefix for m in family.members)


def _cost(family: Family, lengths: Sequence[int], pair_cost: float) -> float:
    """Tokens, and the pairs of tokens that see each other: half of a square, and beside it the prefix."""
    pairs = (family.prefix**2 + sum(lengths[m] ** 2 - family.prefix**2 for m in family.members)) / 2
    return _tokens(family, lengths) + pair_cost * pairs
