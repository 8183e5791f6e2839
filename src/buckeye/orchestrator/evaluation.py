"""Evaluation: the same rollouts, on held-out tasks, with one fixed policy version."""

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
from typing import Any

from buckeye.base.disk import write_when_room, write_when_room_async
from buckeye.base.storage import utf8, write_file
from buckeye.config.environments import EnvConfig, EvalEnvConfig
from buckeye.config.orchestrator import EvalConfig
from buckeye.envs.base import GroupEnvironment, Task
from buckeye.inference.client import SamplingParams
from buckeye.monitor.intervals import cluster_of, mean_over_tasks, pass_at_k
from buckeye.monitor.metrics import read_run
from buckeye.monitor.signals import rollouts_level
from buckeye.orchestrator.environments import HELD_OUT, NamedEnvironment, evaluated_split, tasks_of
from buckeye.orchestrator.player import TaskPlayer
from buckeye.orchestrator.rollout import Group, Rollout
from buckeye.orchestrator.task_sampler import GroupTask


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
    def task_rewards(self) -> list[float]:
        """The mean reward of every task that has a scored rollout, in task order."""
        tasks = self.by_task.values()
        return [statistics.fmean(r.reward for r in rollouts if r.reward is not None) for rollouts in tasks]

    @property
    def mean_reward(self) -> float:
        """Over tasks, as pass@k: a task of which a rollout failed counts as much as the others."""
        return statistics.fmean(self.task_rewards) if self.rewards else math.nan

    def pass_at(self, k: int) -> float | None:
        """The unbiased estimate of pass@k (Chen et al. 2021, eq. 1), a reward >= 1 counting as a pass.

        None unless every task has at least k scored rollouts.
        """
        tasks = self.by_task.values()
        if not tasks or min(len(rollouts) for rollouts in tasks) < k:
            return None
        return statistics.fmean(pass_at_k(len(rollouts), count_passed(rollouts), k) for rollouts in tasks)

    @property
    def level(self) -> int:
        """The level of the log line."""
        truncated = sum(r.truncated for r in self.rollouts)
        return rollouts_level(len(self.played), errored=self.errored, truncated=truncated)

    def summary(self) -> str:
        """The era's log line."""
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
        """The era's metric names, plus the mean of every logged component; no mean if nothing was scored.
        Means are over tasks."""
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
) -> EvalResult:
    """Play the first `num_examples` tasks (-1: all) of a split (None: that of `evaluated_split`), each
    `rollouts_per_example` times."""
    split = evaluated_split(env, split)
    tasks = tasks_of(env, split)
    count = len(tasks) if num_examples < 0 else min(num_examples, len(tasks))
    started = time.monotonic()
    played = await play_tasks(env, player, [tasks[index] for index in range(count)], rollouts_per_example)
    return EvalResult(
        env_name=env.name,
        played=played,
        rollouts_per_example=rollouts_per_example,
        seconds=time.monotonic() - started,
        split=split,
    )


async def play_tasks(
    env: NamedEnvironment,
    player: TaskPlayer,
    tasks: Sequence[Task],
    each: int,
    *,
    known: Collection[tuple[str, int]] = (),
    ended: Callable[[int, Rollout], None] = lambda number, rollout: None,
) -> list[Rollout]:
    """Play `each` rollouts of every task, but for those in `known`, by the task's id and their number. The
    result is task by task; `ended` hears of each as soon as it has its reward, and may raise: that ends all.

    Where rewards depend on the others of a task, all of them are played again if one is not known.
    """
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


def count_passed(rollouts: Sequence[Rollout]) -> int:
    """How many have a reward of at least 1."""
    return sum(r.reward is not None and r.reward >= 1.0 for r in rollouts)


def evaluated_versions(metrics: Path, start_step: int) -> set[int]:
    """The versions that an earlier attempt of a run resumed at `start_step` has evaluated. Later ones belong
    to a line of training that was abandoned, so they are not among them."""
    return {version for version in read_run(metrics).of("eval") if version <= start_step}


# What an evaluation leaves on the disk: `<env>.json` with its settings and figures, `<env>.jsonl` with its
# rollouts.

log = logging.getLogger(__name__)


async def evaluate_and_write(
    directory: Path,
    environments: Sequence[tuple[EvalEnvConfig, NamedEnvironment]],
    settings: EvalConfig,
    player: TaskPlayer,
    *,
    measured: Mapping[str, Any],
) -> dict[str, float]:
    """Evaluate on all environments as `settings` says, write their files, and return their metrics.

    `measured` goes into the files; it says what is evaluated and how it samples.
    """
    metrics: dict[str, float] = {}
    for env_config, env in environments:
        examples, each = env_config.num_examples, env_config.rollouts_per_example
        result = await evaluate(
            env,
            player,
            split=env_config.split,
            num_examples=settings.num_examples if examples is None else examples,
            rollouts_per_example=settings.rollouts_per_example if each is None else each,
        )
        log.log(result.level, result.summary())
        if (step := measured.get("step")) is not None and {*result.versions} - {step}:
            names = ", ".join(map(str, result.versions))
            log.warning("The evaluation of step %d on %s was played by versions %s", step, env.name, names)
        record = {**measured, **environment_record(env_config, result.split)}
        for path, text in (await asyncio.to_thread(_files, directory, result, record)).items():
            what = f"the evaluation {path.name}"
            write = partial(write_file, path, text)
            await write_when_room_async(path, write, what=what, needed=len(text))
        metrics |= result.metrics()
    return metrics


def environment_record(env: EnvConfig, split: str) -> dict[str, Any]:
    """What was evaluated on."""
    return {"id": env.id, "args": dict(env.args), "split": split}


def sampling_record(params: SamplingParams, seq_len: int) -> dict[str, Any]:
    """How the policy sampled."""
    names = ("temperature", "top_p", "top_k", "min_tokens", "max_tokens")
    return {"sampling": {name: getattr(params, name) for name in names}, "seq_len": seq_len}


def write_evaluation(directory: Path, result: EvalResult, measured: Mapping[str, Any]) -> None:
    """Write both files of one environment. Where the disk is full it waits."""
    for path, text in _files(directory, result, measured).items():
        what = f"the evaluation {path.name}"
        write_when_room(path, partial(write_file, path, text), what=what, needed=len(text))


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
                "reward": rollout.reward,
                "components": dict(rollout.outcome.components),
                "stop_reason": rollout.outcome.stop_reason,
                "truncated": rollout.truncated,
                "error": rollout.outcome.error,
                "trace": list(rollout.outcome.trace),
                "turns": rollout.turns,
                "completion_tokens": rollout.completion_tokens,
                "oldest_version": rollout.oldest_version,
                "messages": list(rollout.messages),
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
    if result.rewards:
        tasks = list(result.by_task.values())
        clusters = [cluster_of(rollouts[0].task.id, rollouts[0].task.data) for rollouts in tasks]
        exact = mean_over_tasks([count_passed(rollouts) / len(rollouts) for rollouts in tasks], clusters)
        figures |= {
            "mean_reward": result.mean_reward,
            "exact": exact.value,
            "ci95": (exact.low, exact.high),
        }
    return figures
