"""How sure a measured share is: pass@k, score intervals, and a bootstrap over clusters of related tasks."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

RESAMPLES = 2000
MIN_DIFFERENT = 6
"""A bootstrap needs as many clusters that differ from the commonest outcome. With fewer, most resamples look
the same and the interval is too narrow: five changes in one direction have p = 0.06 in a sign test, while a
bootstrap of them excludes 0."""

Method = Literal["bootstrap", "score"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % interval. `n` counts tasks, `clusters` groups of related ones, and
    `largest` the tasks in the largest of these."""

    value: float
    low: float
    high: float
    n: int
    clusters: int
    largest: int
    method: Method


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The unbiased estimate of pass@k from `n` rollouts of which some passed (Chen et al. 2021, eq. 1).

    Raises ValueError unless 1 <= k <= n and 0 <= passed <= n.
    """
    if not 1 <= k <= n or not 0 <= passed <= n:
        raise ValueError(f"pass@{k} of {n} rollouts, {passed} passed")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def wilson_interval(successes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson 1927); 95 % by default. (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def cluster_of(task_id: str, data: Mapping[str, Any]) -> str:
    """What a task shares with related ones: the first of its `lemma_ids`, the word it is about; or itself."""
    lemmas = data.get("lemma_ids")
    return str(lemmas[0]) if isinstance(lemmas, list | tuple) and lemmas else f"task {task_id}"


def share(values: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0) -> Estimate:
    """The mean of values in [0, 1], one per task, with a percentile interval of a bootstrap over clusters.

    Where fewer than `MIN_DIFFERENT` clusters differ from the commonest outcome (none solved, all solved, few
    clusters) it is the Wilson interval with the number of clusters as n.
    Raises ValueError without values.
    """
    totals = _by_cluster(values, clusters)
    mean = statistics.fmean(values)
    if _different(totals) >= MIN_DIFFERENT:
        return _estimate(mean, _bootstrap(totals, seed), totals, "bootstrap")
    return _estimate(mean, wilson_interval(mean * len(totals), len(totals)), totals, "score")


def paired_difference(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0
) -> Estimate:
    """The mean of `after - before` over the same tasks, with a bootstrap interval over clusters.

    Where fewer than `MIN_DIFFERENT` clusters differ from the commonest change, it is made of the Wilson
    intervals of the share that rose and the share that fell, with the number of clusters as n, combined as in
    Newcombe (1998), method 10.
    Raises ValueError without values.
    """
    changes = [b - a for a, b in zip(before, after, strict=True)]
    totals = _by_cluster(changes, clusters)
    mean = statistics.fmean(changes)
    if _different(totals) >= MIN_DIFFERENT:
        return _estimate(mean, _bootstrap(totals, seed), totals, "bootstrap")
    rose = statistics.fmean(max(change, 0.0) for change in changes)
    fell = statistics.fmean(max(-change, 0.0) for change in changes)
    rose_low, rose_high = wilson_interval(rose * len(totals), len(totals))
    fell_low, fell_high = wilson_interval(fell * len(totals), len(totals))
    low = mean - math.hypot(rose - rose_low, fell_high - fell)
    high = mean + math.hypot(rose_high - rose, fell - fell_low)
    return _estimate(mean, (max(-1.0, low), min(1.0, high)), totals, "score")


def _by_cluster(values: Sequence[float], clusters: Sequence[Hashable]) -> list[tuple[float, int]]:
    """The sum and the count of the values in every cluster."""
    if not values:
        raise ValueError("no values")
    members: dict[Hashable, list[float]] = defaultdict(list)
    for value, cluster in zip(values, clusters, strict=True):
        members[cluster].append(value)
    return [(math.fsum(v), len(v)) for v in members.values()]


def _different(totals: Sequence[tuple[float, int]]) -> int:
    """How many clusters have another mean than the commonest one."""
    means = Counter(round(total / count, 9) for total, count in totals)
    return len(totals) - max(means.values())


def _bootstrap(totals: Sequence[tuple[float, int]], seed: int) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the mean over resampled clusters."""
    draw = random.Random(seed).choices
    sums, counts = zip(*totals, strict=True)
    means = []
    for _ in range(RESAMPLES):
        drawn = draw(range(len(totals)), k=len(totals))
        means.append(sum(map(sums.__getitem__, drawn)) / sum(map(counts.__getitem__, drawn)))
    cuts = statistics.quantiles(means, n=40, method="inclusive")
    return cuts[0], cuts[-1]


def _estimate(
    value: float, interval: tuple[float, float], totals: Sequence[tuple[float, int]], method: Method
) -> Estimate:
    low, high = min(interval[0], value), max(interval[1], value)  # rounding may leave the value outside
    counts = [count for _, count in totals]
    return Estimate(
        value=value,
        low=low,
        high=high,
        n=sum(counts),
        clusters=len(counts),
        largest=max(counts),
        method=method,
    )
