"""Which task is played next. A resumed run goes on exactly: without a curriculum the task is a pure function
of (seed, group index), with one it depends on the statistics too, which are part of the state. So is which
tasks are solved for good: their groups are passed over."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from buckeye.config.environments import EnvMixConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Task
from buckeye.orchestrator.curriculum import Curriculum, load_curricula
from buckeye.orchestrator.environments import NamedEnvironment, tasks_of
from buckeye.orchestrator.mixture import EVENLY, Mix


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTask:
    """The task of one group. `index` counts groups from the start of the run."""

    index: int
    env: NamedEnvironment
    task: Task


class TaskSampler:
    """Deals tasks to groups: environments by their ratios, their tasks in a seeded order per epoch, or by the
    environment's entry in `curricula` if it has one.

    `mix` says how environments take turns. No task is dealt twice in an epoch; an epoch that `mix` does not
    cut short deals all of them. With `no_positive_resampling`, a task whose group had at least that mean
    reward is solved for good (Khatri et al. 2025, ScaleRL, arXiv 2510.13786): `first_unsolved` passes over
    its groups, and what is left gets their place. Tasks of a curriculum are never solved for good.
    """

    def __init__(
        self,
        environments: Sequence[NamedEnvironment],
        *,
        seed: int,
        split: str = "train",
        mix: EnvMixConfig = EVENLY,
        curricula: Mapping[str, Curriculum] | None = None,
        no_positive_resampling: float | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if not environments:
            raise ValueError("a TaskSampler needs at least one environment")
        self._environments = tuple(environments)
        self._curricula = curricula or {}
        self._tasks: Mapping[str, Sequence[Task]] = {
            e.name: tasks_of(e, split) for e in environments if e.name not in self._curricula
        }
        self._seed = seed
        self._solved_from = no_positive_resampling
        solved = (state or {}).get("solved", {})
        self._solved = {name: set(solved.get(name, ())) for name in self._tasks}
        self._passed_over = int((state or {}).get("passed_over", 0))
        sizes = [len(self._tasks[e.name]) if e.name in self._tasks else None for e in environments]
        self._mix = Mix(mix.probabilities or [e.ratio for e in environments], sizes, mix)

    def __getitem__(self, index: int) -> GroupTask:
        """The task of group `index` (from 0), which is not settled yet."""
        env = self.environment_of(index)
        if env.name in self._curricula:
            return GroupTask(index=index, env=env, task=self._curricula[env.name].deal(index))
        return GroupTask(index=index, env=env, task=self._tasks[env.name][self._position(index, env.name)])

    def first_unsolved(self, index: int) -> int:
        """The first group from `index` on whose task is not solved for good; only while not `exhausted`."""
        while True:
            env = self.environment_of(index)
            if env.name in self._curricula or self._position(index, env.name) not in self._solved[env.name]:
                return index
            self._passed_over += 1
            index += 1

    @property
    def exhausted(self) -> bool:
        """Whether every task is solved for good."""
        return not self.has_tasks_beside(frozenset())

    def has_tasks_beside(self, held: Set[str]) -> bool:
        """Whether there is anything to play in environments other than `held`."""
        curricula = self._curricula.keys() - held
        return bool(curricula) or any(
            name not in held and len(self._solved[name]) < len(tasks) for name, tasks in self._tasks.items()
        )

    def environment_of(self, index: int) -> NamedEnvironment:
        """The environment of group `index`."""
        return self._environments[self._mix[index].environment]

    def settle(self, index: int, rewards: Sequence[float]) -> None:
        """Group `index` got these rewards and will not be played again."""
        env = self.environment_of(index)
        if env.name in self._curricula:
            self._curricula[env.name].settle(index, rewards)
        elif self._solved_from is not None and rewards and statistics.fmean(rewards) >= self._solved_from:
            self._solved[env.name].add(self._position(index, env.name))

    def state(self) -> dict[str, Any]:
        """What `load_curricula` restores, under `curriculum`; the positions of the tasks that are solved for
        good, under `solved`; and how many groups were `passed_over`. Only what is in use."""
        states = {name: curriculum.state() for name, curriculum in self._curricula.items()}
        state: dict[str, Any] = {"curriculum": states} if states else {}
        if self._solved_from is not None:
            state["solved"] = {name: sorted(positions) for name, positions in self._solved.items()}
            state["passed_over"] = self._passed_over
        return state

    def metrics(self) -> dict[str, float]:
        """The numbers of all curricula, and of the tasks that are solved for good."""
        metrics = {key: value for c in self._curricula.values() for key, value in c.metrics().items()}
        if self._solved_from is not None:
            metrics["tasks/solved_for_good"] = sum(map(len, self._solved.values()))
            metrics["tasks/passed_over"] = self._passed_over
        return metrics

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
        mix=config.env_mix,
        curricula=load_curricula(environments, config.seed, state) if config.curriculum else {},
        no_positive_resampling=config.no_positive_resampling,
        state=state,
    )


@lru_cache(maxsize=64)
def _epoch_order(seed: str, size: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)  # noqa: S311  chance that keeps no secret
    return order
