"""Sampling bias of a batch: lengths and durations of used rollouts compared with lost ones."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from buckeye.orchestrator.collected_groups import CollectedGroups
from buckeye.orchestrator.rollout import Group, Rollout

_STEPS = 100  # compared together: enough to detect small differences, and few enough to forget old ones

_MEASURES: Mapping[str, Callable[[Rollout], float]] = {
    "seconds": lambda rollout: rollout.seconds,
    "completion_len": lambda rollout: rollout.completion_tokens,
}


@dataclass(slots=True)
class _Moments:
    """Count, sum and sum of squares of some numbers."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def error(self) -> float:
        """Squared standard error of the mean; needs at least two numbers."""
        variance = max(0.0, self.squares / self.count - self.mean**2) * self.count / (self.count - 1)
        return variance / self.count


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of kept from all, relative to the mean of all, and in standard errors (Welch 1947)."""

    relative: float
    errors: float


def difference(kept: Sequence[_Moments], lost: Sequence[_Moments]) -> Difference | None:
    """Return the difference between the mean of the kept values and the mean of all values.

    None with fewer than two values on either side, or if the mean of all is not positive.
    """
    a, b = _merge(kept), _merge(lost)
    if a.count < 2 or b.count < 2:
        return None
    share, apart = b.count / (a.count + b.count), a.mean - b.mean
    everything, error = a.mean - share * apart, math.sqrt(a.error + b.error)
    if everything <= 0.0:
        return None
    sure = apart / error if error else math.copysign(math.inf, apart) if apart else 0.0
    return Difference(share * apart / everything, max(-1e6, min(1e6, sure)))


def _merge(parts: Iterable[_Moments]) -> _Moments:
    whole = _Moments()
    for part in parts:
        whole.count += part.count
        whole.total += part.total
        whole.squares += part.squares
    return whole


class _Comparison:
    """Two sides of one comparison, over the last `_STEPS` steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[_Moments, _Moments]] = deque(maxlen=_STEPS)

    def add(self, kept: Iterable[float], lost: Iterable[float]) -> None:
        sides = _Moments(), _Moments()
        for side, values in zip(sides, (kept, lost), strict=True):
            for value in values:
                side.add(value)
        self._steps.append(sides)

    def values(self, name: str) -> dict[str, float]:
        result = difference([kept for kept, _ in self._steps], [lost for _, lost in self._steps])
        return {} if result is None else {name: result.relative, f"{name}/errors": result.errors}


class CollectionWatch:
    """Comparisons over the last steps.

    * `collection/bias/...`: used groups with lost groups. Groups are independent of each other; rollouts of a
      group are not.
    * `collection/failures/...`: attempts with a reward with failed attempts.
    * `collection/failures/reward`: mean rewards of groups without and with failed attempts; only groups with
      at least one reward.

    The first two leave out attempts without a sampled token, such as a refused prompt: they have no length.
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
            self._add(f"bias/{name}", _means(arrived, measure), _means(collected.lost, measure))
            scored = [measure(attempt) for attempt in sampled if attempt.reward is not None]
            self._add(
                f"failures/{name}",
                scored,
                [measure(attempt) for attempt in sampled if attempt.reward is None],
            )
        sound, failing = list[float](), list[float]()
        for group in collected.all_groups:
            if group.rewards:
                (failing if group.failed_attempts else sound).append(statistics.fmean(group.rewards))
        self._add("failures/reward", sound, failing)
        return {**_step_metrics(collected, attempts), **self._differences()}

    def _add(self, name: str, kept: Iterable[float], lost: Iterable[float]) -> None:
        self._comparisons[name].add(kept, lost)

    def _differences(self) -> dict[str, float]:
        return {
            key: value
            for name, comparison in self._comparisons.items()
            for key, value in comparison.values(f"collection/{name}").items()
        }


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
