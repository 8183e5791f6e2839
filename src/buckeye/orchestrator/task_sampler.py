"""Which task is played next. A resumed run goes on exactly: without a curriculum it is a pure function of
(seed, group index), with one it depends on the statistics too, which are part of the state."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from buckeye.envs.base import Task
from buckeye.orchestrator.curriculum import Curriculum
from buckeye.orchestrator.environments import NamedEnvironment, tasks_of


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTask:
    """The task of one group. `index` counts groups from the start of the run."""

    index: int
    env: NamedEnvironment
    task: Task


class TaskSampler:
    """Deals tasks to groups: environments by their ratios, their tasks in a seeded order per epoch, or by the
    environment's entry in `curricula` if it has one.

    Environments are interleaved by largest deficit, so any stretch of groups is as close to the ratios as
    whole numbers allow. Every task of an epoch is dealt once before any is dealt again.
    """

    def __init__(
        self,
        environments: Sequence[NamedEnvironment],
        *,
        seed: int,
        split: str = "train",
        curricula: Mapping[str, Curriculum] | None = None,
    ) -> None:
        if not environments:
            raise ValueError("a TaskSampler needs at least one environment")
        self._environments = tuple(environments)
        self._curricula = curricula or {}
        self._tasks: Mapping[str, Sequence[Task]] = {
            e.name: tasks_of(e, split) for e in environments if e.name not in self._curricula
        }
        self._seed = seed
        self._dealt: list[int] = []  # group index -> position in self._environments
        self._counts = [0] * len(environments)
        self._nth: list[int] = []  # group index -> how many groups its environment had before it

    def __getitem__(self, index: int) -> GroupTask:
        """The task of group `index` (from 0), which is not settled yet."""
        env = self._environment_of(index)
        if env.name in self._curricula:
            return GroupTask(index=index, env=env, task=self._curricula[env.name].deal(index))
        tasks = self._tasks[env.name]
        epoch, position = divmod(self._nth[index], len(tasks))
        order = _epoch_order(f"{self._seed}/{env.name}/{epoch}", len(tasks))
        return GroupTask(index=index, env=env, task=tasks[order[position]])

    def settle(self, index: int, rewards: Sequence[float]) -> None:
        """Group `index` got these rewards and will not be played again."""
        env = self._environment_of(index)
        if env.name in self._curricula:
            self._curricula[env.name].settle(index, rewards)

    def state(self) -> dict[str, Any]:
        """What `load_curricula` restores, under the key `curriculum`; nothing without a curriculum."""
        states = {name: curriculum.state() for name, curriculum in self._curricula.items()}
        return {"curriculum": states} if states else {}

    def metrics(self) -> dict[str, float]:
        """The numbers of all curricula."""
        return {key: value for c in self._curricula.values() for key, value in c.metrics().items()}

    def _environment_of(self, index: int) -> NamedEnvironment:
        while len(self._dealt) <= index:
            self._deal_next()
        return self._environments[self._dealt[index]]

    def _deal_next(self) -> None:
        total = sum(e.ratio for e in self._environments)
        dealt = len(self._dealt) + 1
        deficits = [
            e.ratio / total * dealt - n for e, n in zip(self._environments, self._counts, strict=True)
        ]
        chosen = deficits.index(max(deficits))
        self._dealt.append(chosen)
        self._nth.append(self._counts[chosen])
        self._counts[chosen] += 1


@lru_cache(maxsize=64)
def _epoch_order(seed: str, size: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order
