"""Compute the rewards of a run by step, and compare them with the rewards of another run."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from buckeye.monitor.intervals import Estimate, mean_over_tasks, paired_difference, student_quantile
from buckeye.runs import Run

_PARTS = 4
_PAIRED_FROM = 6  # minimum number of shared tasks; nearly all tasks of both runs must be shared
_NEARLY_ALL = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanInterval:
    """Mean over `n` tasks with its 95 % interval. `low` and `high` are None if the interval is unknown."""

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Step of a run: seconds of training up to its end, and the rewards of each task."""

    step: int
    seconds: float
    rewards: Mapping[Hashable, Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsComparison:
    """Comparison over the steps `first` to `last`: the mean reward of each run, and B minus A.

    `a`, `b` and `difference` are None without data. `paired` is True if `difference` compares task by task.
    """

    first: int
    last: int
    a: MeanInterval | None
    b: MeanInterval | None
    difference: MeanInterval | None
    paired: bool


def points_of(run: Run) -> list[Point]:
    """Return the steps of a run with known rewards. Each group is one value: its mean reward."""
    groups = defaultdict[int, dict[Hashable, list[float]]](lambda: defaultdict(list))
    for step, task, prompt, reward in run.query(
        "SELECT step, task, prompt, avg(reward) FROM rollouts WHERE split = 'train' AND retried = 0 AND "
        "reward IS NOT NULL GROUP BY step, env, task, prompt, grp"
    ):
        groups[step][task, prompt].append(reward)
    seconds, found = 0.0, list[Point]()
    for step in run.steps:
        seconds += step.value("trainer/time/total") or step.value("trainer/seconds") or 0.0
        rewards: dict[Hashable, list[float]] = groups.get(step.number, {})
        if not rewards and step.reward is not None:  # the rollouts of the step were deleted
            rewards = {("step", step.number): [step.reward]}
        if rewards:
            found.append(Point(step=step.number, seconds=seconds, rewards=rewards))
    return found


def compare_steps(a: Sequence[Point], b: Sequence[Point]) -> list[StepsComparison]:
    """Compare each quarter of the common steps of two runs. Return [] if the runs have no common steps."""
    if not a or not b:
        return []
    first, end = max(a[0].step, b[0].step), min(a[-1].step, b[-1].step) + 1
    if end <= first:
        return []
    ends = sorted({first + (end - first) * part // _PARTS for part in range(_PARTS + 1)})
    return [
        _part(after, until - 1, *([p for p in run if after <= p.step < until] for run in (a, b)))
        for after, until in itertools.pairwise(ends)
    ]


def _part(first: int, last: int, a: Sequence[Point], b: Sequence[Point]) -> StepsComparison:
    these, others = _by_task(a), _by_task(b)
    difference, paired = difference_of(these, others) if these and others else (None, False)
    return StepsComparison(
        first=first,
        last=last,
        a=mean_of(these.values()),
        b=mean_of(others.values()),
        difference=difference,
        paired=paired,
    )


def _by_task(points: Iterable[Point]) -> dict[Hashable, float]:
    """Return the mean reward of each task."""
    found = defaultdict[Hashable, list[float]](list)
    for point in points:
        for task, rewards in point.rewards.items():
            found[task] += rewards
    return {task: statistics.fmean(rewards) for task, rewards in found.items()}


def mean_of(values: Iterable[float]) -> MeanInterval | None:
    """Return the mean with its interval, or None without values.

    The interval is Student's, or for rewards from 0 to 1 the score interval, which stays in this range.
    """
    known = list(values)
    if not known:
        return None
    if len(known) < 2:
        return MeanInterval(value=known[0], low=None, high=None, n=1)
    if _are_shares(known):
        return _interval_of(mean_over_tasks(known, range(len(known))))
    return _mean(statistics.fmean(known), _error(known), len(known) - 1, len(known))


def difference_of(
    these: Mapping[Hashable, float], others: Mapping[Hashable, float]
) -> tuple[MeanInterval, bool]:
    """Return the mean of `others` minus the mean of `these`, and True if the difference is paired by task.

    The difference is paired if nearly all tasks are in both runs.
    """
    shared = [task for task in these if task in others]
    if len(shared) >= max(_PAIRED_FROM, _NEARLY_ALL * max(len(these), len(others))):
        return paired_mean([these[task] for task in shared], [others[task] for task in shared]), True
    a, b = list(these.values()), list(others.values())
    value, n = statistics.fmean(b) - statistics.fmean(a), len(a) + len(b)
    if min(len(a), len(b)) < 2:
        return MeanInterval(value=value, low=None, high=None, n=n), False
    squares = [_error(known) ** 2 for known in (a, b)]
    shares = [square**2 / (len(known) - 1) for square, known in zip(squares, (a, b), strict=True)]
    degrees = sum(squares) ** 2 / sum(shares) if sum(shares) else n - 2.0  # Welch and Satterthwaite
    found = _mean(value, math.sqrt(sum(squares)), max(1, math.floor(degrees)), n)
    if _are_shares((*a, *b)) and found.low is not None and found.high is not None:
        # rewards from 0 to 1 cannot differ by more than 1
        found = replace(found, low=max(-1.0, found.low), high=min(1.0, found.high))
    return found, False


def _interval_of(found: Estimate) -> MeanInterval:
    return MeanInterval(value=found.value, low=found.low, high=found.high, n=found.n)


def _are_shares(values: Iterable[float]) -> bool:
    return all(0.0 <= value <= 1.0 for value in values)


def paired_mean(these: Sequence[float], others: Sequence[float]) -> MeanInterval:
    """Return the mean of `others` minus `these`, task by task, with its interval. Needs at least one task."""
    if _are_shares((*these, *others)):
        return _interval_of(paired_difference(these, others, range(len(these))))
    known = mean_of(b - a for a, b in zip(these, others, strict=True))
    assert known is not None  # tasks exist
    return known


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _mean(value: float, error: float, degrees: int, n: int) -> MeanInterval:
    """Return a mean with Student's interval. If all values are equal, the interval is unknown."""
    if not error:
        return MeanInterval(value=value, low=None, high=None, n=n)
    half = student_quantile(degrees) * error
    return MeanInterval(value=value, low=value - half, high=value + half, n=n)
