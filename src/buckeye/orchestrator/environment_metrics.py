"""Metrics of each environment, over all rollouts that ended while a batch was collected."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from buckeye.orchestrator.rollout import Group, Rollout


@dataclass(slots=True)
class _Counts:
    """Values of one environment: an entry per scored rollout, and the number of errors by boundary."""

    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, rollout: Rollout, *, drawn: bool) -> None:
        if rollout.reward is None:
            self.errors[rollout.outcome.boundary or "step"] += 1
            return
        if drawn:
            self.rewards.append(rollout.reward)
        self.turns.append(rollout.turns)
        self.completion_tokens.append(rollout.completion_tokens)
        self.tokens.append(rollout.total_tokens)


class EnvironmentMetrics:
    """Values by environment, including those of dropped groups."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, _Counts] = defaultdict(_Counts)

    def add(self, group: Group, *, drawn: bool = True) -> None:
        """Add all attempts of a group, including failed ones.

        With `drawn=False`, do not count the rewards, because the task will run again in another group.
        """
        for attempt in group.attempts:
            self._counts[attempt.env_name].add(attempt, drawn=drawn)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics `env/<name>/...`.

        `share` is the environment's share of the rollouts in `groups`.
        """
        in_batch = Counter(rollout.env_name for group in groups for rollout in group.scored)
        metrics: dict[str, float] = {}
        for name, counts in self._counts.items():
            key = f"env/{name}"
            metrics[f"{key}/share"] = in_batch[name] / max(1, in_batch.total())
            metrics[f"{key}/errored"] = counts.errors.total()
            metrics |= {f"{key}/errors/{boundary}": count for boundary, count in counts.errors.items()}
            if counts.rewards:
                metrics[f"{key}/reward/played"] = statistics.fmean(counts.rewards)
            if counts.turns:
                metrics[f"{key}/turns/mean"] = statistics.fmean(counts.turns)
                metrics[f"{key}/completion_len/mean"] = statistics.fmean(counts.completion_tokens)
                metrics[f"{key}/seq_len/mean"] = statistics.fmean(counts.tokens)
        return metrics
