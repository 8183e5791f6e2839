"""Choice of the task of each group, from seed and group index only: a resume continues the same sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from buckeye.envs.base import Task
from buckeye.orchestrator.environments import NamedEnvironment, load_split


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTask:
    """Task of one group. `index` counts groups from the start of the run."""

    index: int
    env: NamedEnvironment
    task: Task


class EnvironmentMix:
    """Assignment of groups to environments. `sizes` has the number of tasks of each environment.

    The next group goes to the environment that is furthest below its share. So at any time, the counts are as
    close to the shares as possible. An environment begins a new epoch when all its tasks have been used.
    """

    def __init__(self, shares: Sequence[float], sizes: Sequence[int]) -> None:
        total = sum(shares)
        self._shares = [share / total for share in shares]
        self._sizes = list(sizes)
        self._assigned: list[tuple[int, int, int]] = []
        self._counts = [0] * len(sizes)  # groups of each environment

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        """Return the index of the environment, the epoch, and the position in the epoch of group `index`."""
        while len(self._assigned) <= index:
            count = len(self._assigned) + 1
            deficits = [share * count - n for share, n in zip(self._shares, self._counts, strict=True)]
            chosen = deficits.index(max(deficits))
            self._assigned.append((chosen, *divmod(self._counts[chosen], self._sizes[chosen])))
            self._counts[chosen] += 1
        return self._assigned[index]


class TaskSampler:
    """Assignment of train tasks to groups: environments by ratio, tasks in a seeded order per epoch.

    An epoch uses each task once.
    """

    def __init__(self, environments: Sequence[NamedEnvironment], *, seed: int) -> None:
        self._environments = tuple(environments)
        self._tasks = [load_split(env, "train") for env in environments]
        self._seed = seed
        self._mix = EnvironmentMix([env.ratio for env in environments], [len(tasks) for tasks in self._tasks])

    def __getitem__(self, index: int) -> GroupTask:
        """Return the task of group `index` (from 0)."""
        environment, epoch, nth = self._mix[index]
        env, tasks = self._environments[environment], self._tasks[environment]
        position = _epoch_order(f"{self._seed}/{env.name}/{epoch}", len(tasks))[nth]
        return GroupTask(index=index, env=env, task=tasks[position])

    def has_tasks_outside(self, held: Set[str]) -> bool:
        """Return True if an environment outside `held` has tasks."""
        return any(env.name not in held for env in self._environments)

    def environment_of(self, index: int) -> NamedEnvironment:
        """Return the environment of group `index`."""
        return self._environments[self._mix[index][0]]


@lru_cache(maxsize=64)
def _epoch_order(seed: str, size: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)  # noqa: S311  not for security
    return order
