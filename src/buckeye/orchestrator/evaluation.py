"""Evaluation: the tasks of a split are played with one fixed policy, and what came of them is put together.

All evaluate here: a run while it trains, `buckeye eval`, and the checks that play a model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from buckeye.base.disk import write_when_room_async
from buckeye.base.storage import utf8, write_file
from buckeye.config.environments import EvalEnvConfig
from buckeye.envs.base import GroupEnvironment, Task
from buckeye.inference.client import SamplingParams
from buckeye.monitor.intervals import cluster_of, mean_passed, mean_reward
from buckeye.monitor.metrics import read_run
from buckeye.monitor.signals import rollouts_level
from buckeye.orchestrator.environments import HELD_OUT, NamedEnvironment, evaluated_split, tasks_of
from buckeye.orchestrator.player import TaskPlayer
from buckeye.orchestrator.rollout import Group, Rollout
from buckeye.orchestrator.task_sampler import GroupTask

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoredTask:
    """What the figures of a task are made of: see `TaskRewards`."""

    cluster: str
    rewards: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """Every rollout of one environment, also errored ones: task by task, `rollouts_per_example` of each."""

    env_name: str
    played: Sequence[Rollout]
    rollouts_per_example: int
    seconds: float
    split: str = HELD_OUT

    @property
    def rollouts(self) -> list[Rollout]:
        """Those that have a reward."""
        return [r for r in self.played if r.reward is not None]

    @property
    def errors(self) -> list[Rollout]:
        """Those that have none."""
        return [r for r in self.played if r.reward is None]

    @property
    def errored(self) -> int:
        """How many rollouts have no reward."""
        return len(self.errors)

    @property
    def by_task(self) -> dict[str, list[Rollout]]:
        """Task id -> its scored rollouts, in task order."""
        tasks: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in self.rollouts:
            tasks[rollout.task.id].append(rollout)
        return dict(tasks)

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled its tokens."""
        return sorted({v for r in self.played for s in r.segments for v in s.versions if v >= 0})

    @property
    def rewards(self) -> list[float]:
        """Of the scored rollouts."""
        return [r.reward for r in self.played if r.reward is not None]

    @property
    def tasks(self) -> list[ScoredTask]:
        """Every task that has a scored rollout, in task order."""
        return [
            ScoredTask(
                cluster_of(task, rollouts[0].task.data),
                tuple(r.reward for r in rollouts if r.reward is not None),
            )
            for task, rollouts in self.by_task.items()
        ]

    @property
    def mean_reward(self) -> float:
        """Over tasks, as pass@k: a task of which a rollout failed counts as much as the others."""
        return mean_reward(self.tasks).value if self.rewards else math.nan

    def pass_at(self, k: int) -> float | None:
        """The unbiased estimate of pass@k (Chen et al. 2021, eq. 1), a reward >= 1 counting as a pass.

        None unless every task has at least k scored rollouts.
        """
        estimate = mean_passed(self.tasks, k)
        return None if estimate is None else estimate.value

    @property
    def level(self) -> int:
        """The level of the log line."""
        truncated = sum(r.truncated for r in self.rollouts)
        return rollouts_level(len(self.played), errored=self.errored, truncated=truncated)

    def summary(self) -> str:
        """The log line of an evaluation."""
        lengths = [r.completion_tokens for r in self.rollouts] or [0]
        n = self.rollouts_per_example
        parts = [f"Avg@{n}={self.mean_reward:.4f}"]
        if n > 1 and (passed := self.pass_at(max(n // 2, 1))) is not None:
            parts.append(f"Pass@{max(n // 2, 1)}: {passed:.4f}")
        parts.append(
            f"Completion Length: {statistics.fmean(lengths):.2f} "
            f"(±{statistics.pstdev(lengths):.2f}, ∈[{min(lengths):.2f}, {max(lengths):.2f}])"
        )
        truncated = statistics.fmean(float(r.truncated) for r in self.rollouts) if self.rollouts else 0.0
        parts.append(f"Truncated: {truncated:.1%}")
        if self.errored:
            parts.append(f"Errored: {self.errored}")
        return f"Evaluated {self.env_name} in {self.seconds:.1f}s ({', '.join(parts)})"

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """For `metrics.jsonl`: the mean reward, if anything was scored, and that of every component, over
        tasks."""
        key = f"{prefix}/{self.env_name}"
        values = {
            **({f"{key}/avg@{self.rollouts_per_example}": self.mean_reward} if self.rewards else {}),
            f"{key}/num": len(self.rewards),
            f"{key}/errored": self.errored,
            f"{key}/time": round(self.seconds, 3),
        }
        components = means_over_tasks(
            [[r.outcome.components for r in task] for task in self.by_task.values()]
        )
        return values | {f"{key}/{name}": mean for name, mean in components.items()}


async def evaluate(
    env: NamedEnvironment,
    player: TaskPlayer,
    *,
    split: str | None,
    num_examples: int,
    rollouts_per_example: int,
    known: Collection[tuple[str, int]] = (),
    ended: Callable[[int, Rollout], None] = lambda number, rollout: None,
) -> EvalResult:
    """Play the first `num_examples` tasks (-1: all) of a split (None: that of `evaluated_split`), each
    `rollouts_per_example` times, but for the rollouts in `known`, by the task's id and their number. `ended`
    hears of each as soon as it has its reward, and may raise: that ends all."""
    split = evaluated_split(env, split)
    started = time.monotonic()
    tasks = first_tasks(env, split, num_examples)
    return EvalResult(
        env_name=env.name,
        played=await _play(env, player, tasks, rollouts_per_example, known, ended),
        rollouts_per_example=rollouts_per_example,
        seconds=time.monotonic() - started,
        split=split,
    )


def first_tasks(env: NamedEnvironment, split: str, count: int) -> list[Task]:
    """The first tasks of a split, all of them for -1."""
    tasks = tasks_of(env, split)
    return [tasks[index] for index in range(len(tasks) if count < 0 else min(count, len(tasks)))]


async def _play(
    env: NamedEnvironment,
    player: TaskPlayer,
    tasks: Sequence[Task],
    each: int,
    known: Collection[tuple[str, int]],
    ended: Callable[[int, Rollout], None],
) -> list[Rollout]:
    """The rollouts task by task. Where rewards depend on the others of a task, all of them are played again
    if one is not known."""
    started: list[asyncio.Task[Group] | asyncio.Task[Rollout]] = []
    waiting: list[Awaitable[Sequence[Rollout]]] = []

    async def heard(playing: asyncio.Task[Group] | asyncio.Task[Rollout], first: int) -> Sequence[Rollout]:
        result = await playing
        rollouts = result.rollouts if isinstance(result, Group) else (result,)
        for number, rollout in enumerate(rollouts, first):
            ended(number, rollout)
        return rollouts

    for index, task in enumerate(tasks):
        missing = [number for number in range(each) if (task.id, number) not in known]
        if missing and isinstance(env.environment, GroupEnvironment):
            started.append(player.start_group(GroupTask(index=index, env=env, task=task), each))
            waiting.append(heard(started[-1], 0))
        else:
            for number in missing:
                started.append(player.start(env, task, index, number))
                waiting.append(heard(started[-1], number))
    try:
        return [rollout for rollouts in await asyncio.gather(*waiting) for rollout in rollouts]
    except BaseException:
        for playing in started:
            playing.cancel()
        raise


def means_over_tasks(tasks: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Of every number that rollouts have, the mean over tasks of the mean over those rollouts of a task that
    have it. `tasks` holds the numbers of every rollout, task by task."""
    of_tasks: dict[str, list[float]] = defaultdict(list)
    for rollouts in tasks:
        found: dict[str, list[float]] = defaultdict(list)
        for values in rollouts:
            for name, value in values.items():
                found[name].append(value)
        for name, each in found.items():
            of_tasks[name].append(statistics.fmean(each))
    return {name: statistics.fmean(means) for name, means in of_tasks.items()}


def evaluated_versions(metrics: Path, start_step: int) -> set[int]:
    """The versions that an earlier attempt of a run resumed at `start_step` has evaluated. Later ones belong
    to a line of training that was abandoned, so they are not among them."""
    return {version for version in read_run(metrics).of("eval") if version <= start_step}


# What an evaluation leaves on the disk: `<env>.json` with its settings and figures, `<env>.jsonl` with its
# rollouts.


async def evaluate_all(
    environments: Sequence[tuple[EvalEnvConfig, NamedEnvironment]],
    player: TaskPlayer,
    *,
    num_examples: int = -1,
    rollouts_per_example: int = 1,
    directory: Path | None = None,
    measured: Mapping[str, Any] = MappingProxyType({}),
) -> list[EvalResult]:
    """Evaluate on one environment after the other, with `num_examples` and `rollouts_per_example` where its
    own settings do not say.

    With a `directory` each is told in the log and written when it has ended. `measured` goes into the files;
    it says what is evaluated and how it samples.
    """
    results = []
    for settings, env in environments:
        examples, each = settings.num_examples, settings.rollouts_per_example
        result = await evaluate(
            env,
            player,
            split=settings.split,
            num_examples=num_examples if examples is None else examples,
            rollouts_per_example=rollouts_per_example if each is None else each,
        )
        results.append(result)
        if directory is None:
            continue
        log.log(result.level, result.summary())
        if (step := measured.get("step")) is not None and {*result.versions} - {step}:
            names = ", ".join(map(str, result.versions))
            log.warning("The evaluation of step %d on %s was played by versions %s", step, env.name, names)
        played_on = {"id": settings.id, "args": dict(settings.args), "split": result.split}
        await write_evaluation(directory, result, {**measured, **played_on})
    return results


def sampling_record(params: SamplingParams, seq_len: int) -> dict[str, Any]:
    """How the policy sampled."""
    names = ("temperature", "top_p", "top_k", "min_tokens", "max_tokens")
    return {"sampling": {name: getattr(params, name) for name in names}, "seq_len": seq_len}


async def write_evaluation(directory: Path, result: EvalResult, measured: Mapping[str, Any]) -> None:
    """Write both files of one environment."""
    for path, text in (await asyncio.to_thread(_files, directory, result, measured)).items():
        write = partial(write_file, path, text)
        await write_when_room_async(path, write, what=f"the evaluation {path.name}", needed=len(text))


def _files(directory: Path, result: EvalResult, measured: Mapping[str, Any]) -> dict[Path, bytes]:
    """The content of both files, the rollouts last: they say that the evaluation is complete.

    What a task's data or a message holds that JSON cannot is written as text.
    """
    figures = {**measured, **_figures(result)}
    lines = [
        json.dumps(
            {
                "task_id": rollout.task.id,
                "rollout": index % result.rollouts_per_example,
                "data": dict(rollout.task.data),
                **rollout.record(),
            },
            ensure_ascii=False,
            default=str,
        )
        for index, rollout in enumerate(result.played)
    ]
    return {
        directory / f"{result.env_name}.json": utf8(json.dumps(figures, indent=1, ensure_ascii=False)),
        directory / f"{result.env_name}.jsonl": utf8("".join(f"{line}\n" for line in lines)),
    }


def _figures(result: EvalResult) -> dict[str, Any]:
    """The interval is one over clusters of tasks that share a lemma; see `buckeye.monitor.intervals`."""
    figures: dict[str, Any] = {
        "env": result.env_name,
        "mean_reward": None,
        "exact": None,
        "ci95": None,
        "n": len(result.rewards),
        "errored": result.errored,
        "rollouts_per_example": result.rollouts_per_example,
        "seconds": result.seconds,
        "versions": result.versions,
        **result.metrics(),
    }
    if (exact := mean_passed(result.tasks, 1)) is not None:
        figures |= {
            "mean_reward": result.mean_reward,
            "exact": exact.value,
            "ci95": (exact.low, exact.high),
        }
    return figures
