"""Uncertainty of measured means: pass@k, and intervals over clusters of related tasks."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MIN_DIFFERENT_CLUSTERS = 6
"""Minimum number of clusters whose change differs from the most common change.

With fewer, `paired_difference` does not use the variance between clusters. With five changes in one
direction, a sign test has p = 0.06.
"""

_NORMAL = 1.959964
_STUDENT = {1: 12.7062, 2: 4.3027}
_EQUAL = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Mean over tasks with its 95 % interval.

    `n` is the number of tasks, and `clusters` the number of groups of related tasks.
    """

    value: float
    low: float
    high: float
    n: int
    clusters: int


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from `n` rollouts with `passed` passes.

    Source: Chen et al. 2021, eq. 1. Raise `ValueError` unless 1 <= k <= n and 0 <= passed <= n.
    """
    if not 1 <= k <= n or not 0 <= passed <= n:
        raise ValueError(f"pass@{k} of {n} rollouts, {passed} passed")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


@dataclass(frozen=True, slots=True)
class ScoredTask:
    """Rewards of the scored rollouts of one task, at least one. Tasks with equal `cluster` are related."""

    cluster: str
    rewards: tuple[float, ...]


def mean_reward(tasks: Sequence[ScoredTask]) -> Estimate:
    """Return the mean over tasks of each task's mean reward. Raise `ValueError` without tasks."""
    return mean_over_tasks([statistics.fmean(t.rewards) for t in tasks], [t.cluster for t in tasks])


def is_pass(reward: float, pass_reward: float = 1.0) -> bool:
    """Return True for a reward of at least `pass_reward`, or below it by rounding, as 0.7 + 0.2 + 0.1 is."""
    return reward >= pass_reward - _EQUAL


def mean_pass_at_k(tasks: Sequence[ScoredTask], k: int, *, pass_reward: float = 1.0) -> Estimate | None:
    """Return pass@k over tasks; a reward of at least `pass_reward` is a pass.

    Return None without tasks, or if a task has fewer than k scored rollouts.
    """
    if not tasks or min(len(t.rewards) for t in tasks) < k:
        return None
    passed = [pass_at_k(len(t.rewards), sum(is_pass(r, pass_reward) for r in t.rewards), k) for t in tasks]
    return mean_over_tasks(passed, [t.cluster for t in tasks])


def wilson_interval(successes: float, n: float, z: float = _NORMAL) -> tuple[float, float]:
    """Return the Wilson score interval (Wilson 1927) of a proportion, by default 95 %; (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(max(0.0, p * (1 - p)) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t with `degrees` degrees of freedom, within 0.2 %.

    From three degrees on, use the expansion of Abramowitz & Stegun 26.7.5.
    """
    if degrees in _STUDENT:
        return _STUDENT[degrees]
    z, v = _NORMAL, float(degrees)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def cluster_of(task_id: str, data: Mapping[str, Any]) -> str:
    """Return the cluster of a task: the first of its `lemma_ids`, or the task itself.

    A lemma is the word that the task is about.
    """
    lemmas = data.get("lemma_ids")
    return str(lemmas[0]) if isinstance(lemmas, list | tuple) and lemmas else f"task {task_id}"


def mean_over_tasks(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Return the mean of a reward or a share. Each task has one value, the mean of its rollouts.

    The interval is a Wilson score interval with a Student quantile. The variance between clusters gives the
    effective number of observations (Franco et al. 2019, "Comparative study of confidence intervals for
    proportions in complex sample surveys"). The scale goes from 0 to 1, or further if a value lies outside.

    If a cluster mean is not at an end of the scale, the interval is widened to contain the t interval of Hall
    (1992, "On the removal of skewness by transformation"). `benchmarks/intervals.py` measures how often the
    interval contains the true mean. Raise `ValueError` without values.
    """
    return _estimate(_Clusters.of(values, clusters), 0.0, 1.0)


def paired_difference(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable]
) -> Estimate:
    """Return the mean of `after - before` with its interval, on a scale from -1 to 1.

    `before` and `after` have one share in [0, 1] per task. If fewer than `_MIN_DIFFERENT_CLUSTERS` clusters
    have an unusual change, the interval combines the score intervals of the increases and of the decreases,
    as in Newcombe (1998), method 10. Otherwise it is computed as in `mean_over_tasks`. Raise `ValueError`
    without values.
    """
    changes = [b - a for a, b in zip(before, after, strict=True)]
    found = _Clusters.of(changes, clusters)
    if found.different() >= _MIN_DIFFERENT_CLUSTERS:
        return _estimate(found, -1.0, 1.0)
    rose = _Clusters.of([max(change, 0.0) for change in changes], clusters)
    fell = _Clusters.of([max(-change, 0.0) for change in changes], clusters)
    (rose_low, rose_high), (fell_low, fell_high) = (_score(part, 0.0, 1.0) for part in (rose, fell))
    low = found.mean - math.hypot(rose.mean - rose_low, fell_high - fell.mean)
    high = found.mean + math.hypot(rose_high - rose.mean, fell.mean - fell_low)
    return found.estimate(max(-1.0, low), min(1.0, high))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clusters:
    """Mean, number of values, and deviation of each cluster.

    A deviation is the sum of `value - overall mean`, divided by the mean cluster size. The deviations have
    mean 0. `variance / len(means)` is the variance of the overall mean.
    """

    means: list[float]
    counts: list[int]
    mean: float
    deviations: list[float]
    variance: float

    @classmethod
    def of(cls, values: Sequence[float], clusters: Sequence[Hashable]) -> _Clusters:
        if not values:
            raise ValueError("no values")
        members: dict[Hashable, list[float]] = defaultdict(list)
        for value, cluster in zip(values, clusters, strict=True):
            members[cluster].append(value)
        n, mean = len(members), statistics.fmean(values)
        each = len(values) / n
        deviations = [math.fsum(value - mean for value in found) / each for found in members.values()]
        return cls(
            means=[statistics.fmean(found) for found in members.values()],
            counts=[len(found) for found in members.values()],
            mean=mean,
            deviations=deviations,
            variance=math.fsum(d * d for d in deviations) / (n - 1) if n > 1 else 0.0,
        )

    def different(self) -> int:
        """Return the number of clusters with a mean other than the most common one."""
        return len(self.means) - max(Counter(round(mean, 9) for mean in self.means).values())

    def estimate(self, low: float, high: float) -> Estimate:
        return Estimate(
            value=self.mean,
            low=min(low, self.mean),  # rounding may leave the value outside
            high=max(high, self.mean),
            n=sum(self.counts),
            clusters=len(self.counts),
        )


def _estimate(found: _Clusters, low: float, high: float) -> Estimate:
    """Return the estimate with its interval. Values may lie outside the expected scale, `low` to `high`."""
    bottom, top = min(low, *found.means), max(high, *found.means)
    interval = _score(found, bottom, top)
    at_ends = all(min(mean - bottom, top - mean) <= _EQUAL for mean in found.means)
    if not at_ends and _varies(found):
        skewed = _hall_interval(found)
        interval = min(interval[0], skewed[0]), max(interval[1], skewed[1])
    if (bottom, top) == (low, high):
        interval = max(low, interval[0]), min(high, interval[1])
    return found.estimate(*interval)


def _score(found: _Clusters, bottom: float, top: float) -> tuple[float, float]:
    """Return the score interval on a scale.

    If all cluster means are equal, each cluster counts as one observation.
    """
    n, width = len(found.means), top - bottom
    p, quantile, observations = (found.mean - bottom) / width, _NORMAL, float(n)
    if _varies(found):
        quantile = student_quantile(n - 1)
        observations = p * (1 - p) * n * width * width / found.variance
    low, high = wilson_interval(p * observations, observations, quantile)
    return bottom + width * low, bottom + width * high


def _hall_interval(found: _Clusters) -> tuple[float, float]:
    """Return Hall's interval.

    A cubic function removes the skewness of t. Student's interval is computed for the transformed t, and
    transformed back.
    """
    n, deviation = len(found.means), math.sqrt(found.variance)
    cubes = math.fsum((d / deviation) ** 3 for d in found.deviations)
    skewness = n / ((n - 1) * (n - 2)) * cubes if n > 2 else 0.0

    def back_transform(t: float) -> float:
        if abs(skewness) < 1e-6:
            return t / math.sqrt(n)
        return 3 / skewness * (math.cbrt(1 + skewness * (t / math.sqrt(n) - skewness / (6 * n))) - 1)

    quantile = student_quantile(n - 1)
    return (
        found.mean - deviation * back_transform(quantile),
        found.mean - deviation * back_transform(-quantile),
    )


def _varies(found: _Clusters) -> bool:
    return found.variance > (_EQUAL * max(1.0, abs(found.mean))) ** 2
