"""Metrics of sampling bias: compare lengths and durations of used rollouts with those of lost rollouts."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from buckeye.orchestrator.collected_groups import CollectedGroups
from buckeye.orchestrator.rollout import Group, Rollout

_STEPS = 100  # steps to compare: enough to detect small differences, and few enough to forget old steps

_MEASURES: Mapping[str, Callable[[Rollout], float]] = {
    "seconds": lambda rollout: rollout.seconds,
    "completion_len": lambda rollout: rollout.completion_tokens,
}


class _Comparison:
    """Kept values and lost values of the last `_STEPS` steps."""

    def __init__(self) -> None:
        self._kept: deque[Sequence[float]] = deque(maxlen=_STEPS)
        self._lost: deque[Sequence[float]] = deque(maxlen=_STEPS)

    def add(self, kept: Sequence[float], lost: Sequence[float]) -> None:
        self._kept.append(kept)
        self._lost.append(lost)

    def values(self, name: str) -> dict[str, float]:
        """Return metrics of the difference: mean of the kept values minus mean of all values.

        The metric `name` is the difference divided by the mean of all values. `name/errors` is
        the mean of the kept values minus the mean of the lost values, divided by the standard error of this
        difference (Welch 1947). Return no metrics if either side has fewer than two values, or if the
        mean of all values is not positive.
        """
        kept, lost = (np.fromiter(chain.from_iterable(side), float) for side in (self._kept, self._lost))
        if len(kept) < 2 or len(lost) < 2:
            return {}
        apart, mean = kept.mean() - lost.mean(), np.concatenate([kept, lost]).mean()
        if mean <= 0.0:
            return {}
        error = math.sqrt(kept.var(ddof=1) / len(kept) + lost.var(ddof=1) / len(lost))
        sure = apart / error if error else math.copysign(math.inf, apart) if apart else 0.0
        share = len(lost) / (len(kept) + len(lost))
        return {name: float(share * apart / mean), f"{name}/errors": float(max(-1e6, min(1e6, sure)))}


class CollectionWatch:
    """Comparisons of rollouts over the last steps.

    * `collection/bias/...` compares usable groups with lost groups, which were dropped as stale or errored.
      It compares means of groups, because the rollouts of a group are not independent.
    * `collection/failures/...` compares attempts that have a reward with failed attempts.
    * `collection/failures/reward` compares the mean reward of groups without failed attempts with that of the
      other groups. Groups without a reward are left out.

    The first two leave out attempts without a sampled token, such as a refused prompt, which have no length.
    """

    def __init__(self) -> None:
        names = [f"bias/{name}" for name in _MEASURES] + [f"failures/{name}" for name in _MEASURES]
        self._comparisons = {name: _Comparison() for name in (*names, "failures/reward")}

    def record(self, collected: CollectedGroups) -> dict[str, float]:
        """Add a step's groups, and return its collection metrics with the differences over the last steps."""
        lost = {id(group) for group in collected.lost}
        arrived = [group for group in collected.all_groups if id(group) not in lost]
        attempts = [attempt for group in collected.all_groups for attempt in group.attempts]
        sampled = _sampled(attempts)
        for name, measure in _MEASURES.items():
            bias, failures = self._comparisons[f"bias/{name}"], self._comparisons[f"failures/{name}"]
            bias.add(_means(arrived, measure), _means(collected.lost, measure))
            failures.add(
                [measure(attempt) for attempt in sampled if attempt.reward is not None],
                [measure(attempt) for attempt in sampled if attempt.reward is None],
            )
        sound, failing = list[float](), list[float]()
        for group in collected.all_groups:
            if group.rewards:
                (failing if group.failed_attempts else sound).append(statistics.fmean(group.rewards))
        self._comparisons["failures/reward"].add(sound, failing)
        metrics = _step_metrics(collected, attempts)
        for name, comparison in self._comparisons.items():
            metrics |= comparison.values(f"collection/{name}")
        return metrics


def _step_metrics(collected: CollectedGroups, attempts: Sequence[Rollout]) -> dict[str, float]:
    dropped = [group for _, group in collected.dropped_groups]
    sides = {"trained": collected.groups, "dropped": dropped, "finished": collected.all_groups}
    values = {
        f"collection/{side}/{name}/mean": statistics.fmean(means)
        for side, groups in sides.items()
        for name, measure in _MEASURES.items()
        if (means := _means(groups, measure))
    }
    sampled = sum(attempt.sampling_seconds for attempt in attempts)
    trained = sum(r.sampling_seconds for group in collected.groups for r in group.scored)
    return {
        **values,
        "collection/sampling_seconds": sampled,
        "collection/lost_share": 1.0 - trained / sampled if sampled else 0.0,
    }


def _means(groups: Iterable[Group], measure: Callable[[Rollout], float]) -> list[float]:
    sampled = (_sampled(group.rollouts) for group in groups)
    return [statistics.fmean(map(measure, rollouts)) for rollouts in sampled if rollouts]


def _sampled(attempts: Iterable[Rollout]) -> list[Rollout]:
    """Return the attempts with at least one sampled token."""
    return [attempt for attempt in attempts if attempt.completion_tokens]
