"""Which task is played next. A resumed run goes on exactly: without a curriculum the task is a pure function
of (seed, group index), with one it depends on the statistics too, which are part of the state."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Task
from buckeye.orchestrator.curriculum import Curriculum, load_curricula
from buckeye.orchestrator.environments import NamedEnvironment, tasks_of
from buckeye.orchestrator.mixture import Mix


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTask:
    """The task of one group. `index` counts groups from the start of the run."""

    index: int
    env: NamedEnvironment
    task: Task


class TaskSampler:
    """Deals tasks to groups: environments by their ratios, their tasks in a seeded order per epoch, or by the
    environment's entry in `curricula` if it has one.

    An epoch deals each task once.
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
        sizes = [len(self._tasks[e.name]) if e.name in self._tasks else None for e in environments]
        self._mix = Mix([e.ratio for e in environments], sizes)

    def __getitem__(self, index: int) -> GroupTask:
        """The task of group `index` (from 0), which is not settled yet."""
        env = self.environment_of(index)
        if env.name in self._curricula:
            return GroupTask(index=index, env=env, task=self._curricula[env.name].deal(index))
        return GroupTask(index=index, env=env, task=self._tasks[env.name][self._position(index, env.name)])

    def has_tasks_beside(self, held: Set[str]) -> bool:
        """Whether there is anything to play in environments other than `held`."""
        return any(env.name not in held for env in self._environments)

    def environment_of(self, index: int) -> NamedEnvironment:
        """The environment of group `index`."""
        return self._environments[self._mix[index].environment]

    def settle(self, index: int, rewards: Sequence[float]) -> None:
        """Group `index` got these rewards and will not be played again."""
        env = self.environment_of(index)
        if env.name in self._curricula:
            self._curricula[env.name].settle(index, rewards)

    def state(self) -> dict[str, Any]:
        """Return what `load_curricula` restores, under `curriculum`; nothing without a curriculum."""
        states = {name: curriculum.state() for name, curriculum in self._curricula.items()}
        return {"curriculum": states} if states else {}

    def metrics(self) -> dict[str, float]:
        """Return the numbers of all curricula."""
        return {key: value for c in self._curricula.values() for key, value in c.metrics().items()}

    def _position(self, index: int, name: str) -> int:
        """Where the task of group `index` stands among those of its environment."""
        deal = self._mix[index]
        return _epoch_order(f"{self._seed}/{name}/{deal.epoch}", len(self._tasks[name]))[deal.nth]


def task_sampler(
    config: OrchestratorConfig, environments: Sequence[NamedEnvironment], state: Mapping[str, Any]
) -> TaskSampler:
    """The sampler that the settings ask for, going on from `state`."""
    return TaskSampler(
        environments,
        seed=config.seed,
        curricula=load_curricula(environments, config.seed, state) if config.curriculum else {},
    )


@lru_cache(maxsize=64)
def _epoch_order(seed: str, size: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)  # noqa: S311  chance that keeps no secret
    return order
