"""Samples into bins of bounded length, bins onto ranks of equal work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from buckeye.errors import TransportError


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of samples in bins of at most `capacity` tokens, by first-fit decreasing.

    Each sample is in exactly one bin; a bin lists its samples from the longest to the shortest, so that
    samples of similar length are neighbours. FFD needs at most 11/9 of the optimal number of bins plus 6/9
    (Dósa 2007). A sample longer than `capacity` is a `TransportError`: whoever made the batch should have cut
    it.
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise TransportError(
                f"Sample {index} of the batch has {length} tokens, more than the trainer's seq_len = "
                f"{capacity}. Raise trainer.seq_len, or lower the orchestrator's."
            )
        slot = next((i for i, room in enumerate(free) if room >= length), None)
        if slot is None:
            bins.append([index])
            free.append(capacity - length)
        else:
            bins[slot].append(index)
            free[slot] -= length
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
