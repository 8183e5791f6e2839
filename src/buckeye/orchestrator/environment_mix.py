"""Assign each group an environment and a task: a pure function of the group's number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskAssignment:
    """Assignment of a group: environment (its position), passes over its tasks before, task in this pass."""

    environment: int
    epoch: int
    nth: int


class EnvironmentMix:
    """Assignment of groups to environments; `sizes` has their numbers of tasks.

    The environment with the largest deficit is next, so any stretch of groups is as close to the shares as
    whole numbers allow. Each environment starts a new epoch when all its tasks have been used.
    """

    def __init__(self, shares: Sequence[float], sizes: Sequence[int]) -> None:
        total = sum(shares)
        self._shares = [share / total for share in shares]
        self._sizes = list(sizes)
        self._assigned: list[TaskAssignment] = []
        self._counts = [0] * len(sizes)  # groups of each environment

    def __getitem__(self, index: int) -> TaskAssignment:
        """Return the assignment of group `index` (from 0)."""
        while len(self._assigned) <= index:
            count = len(self._assigned) + 1
            deficits = [share * count - n for share, n in zip(self._shares, self._counts, strict=True)]
            chosen = deficits.index(max(deficits))
            self._assigned.append(TaskAssignment(chosen, *divmod(self._counts[chosen], self._sizes[chosen])))
            self._counts[chosen] += 1
        return self._assigned[index]
