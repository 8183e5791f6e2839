"""Evaluation: run rollouts of a split's tasks with one policy version, and average their rewards.

Evaluations during training, `buckeye eval`, and the checks that sample a model use this module.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from buckeye.envs.base import GroupEnvironment, Task
from buckeye.monitor.intervals import ScoredTask, cluster_of, mean_pass_at_k, mean_reward
from buckeye.monitor.verdicts import rollouts_log_level
from buckeye.orchestrator.environments import HELD_OUT, NamedEnvironment, choose_evaluation_split, load_split
from buckeye.orchestrator.rollout import Group, Rollout
from buckeye.orchestrator.rollout_runner import CLEANUP_SECONDS, RolloutRunner
from buckeye.orchestrator.task_sampler import GroupTask


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """Rollouts of an evaluation on one environment, in the order of the tasks.

    `all_rollouts` has `rollouts_per_example` rollouts per task, including errored rollouts.
    """

    env_name: str
    all_rollouts: Sequence[Rollout]
    rollouts_per_example: int
    seconds: float
    split: str = HELD_OUT

    @property
    def rollouts(self) -> list[Rollout]:
        """Rollouts with a reward."""
        return [r for r in self.all_rollouts if r.reward is not None]

    @property
    def errors(self) -> list[Rollout]:
        """Rollouts without a reward."""
        return [r for r in self.all_rollouts if r.reward is None]

    @property
    def errored(self) -> int:
        """Number of rollouts without a reward."""
        return len(self.errors)

    @property
    def by_task(self) -> dict[str, list[Rollout]]:
        """Scored rollouts by task id, in task order."""
        tasks: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in self.rollouts:
            tasks[rollout.task.id].append(rollout)
        return dict(tasks)

    @property
    def versions(self) -> list[int]:
        """Policy versions that sampled the tokens, sorted."""
        return sorted({span.version for r in self.all_rollouts for s in r.segments for span in s.sampled})

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored rollouts."""
        return [r.reward for r in self.all_rollouts if r.reward is not None]

    @property
    def tasks(self) -> list[ScoredTask]:
        """Tasks with at least one scored rollout, in task order."""
        return [
            ScoredTask(
                cluster_of(task, rollouts[0].task.data),
                tuple(r.reward for r in rollouts if r.reward is not None),
            )
            for task, rollouts in self.by_task.items()
        ]

    @property
    def mean_reward(self) -> float:
        """Mean of the tasks' mean rewards over scored rollouts. NaN if no rollout has a reward."""
        return mean_reward(self.tasks).value if self.rewards else math.nan

    def pass_at(self, k: int) -> float | None:
        """Return the unbiased estimate of pass@k (Chen et al. 2021, eq. 1). A reward >= 1 is a pass.

        Return None unless every task has at least k scored rollouts.
        """
        estimate = mean_pass_at_k(self.tasks, k)
        return None if estimate is None else estimate.value

    @property
    def level(self) -> int:
        """Level of the log line."""
        truncated = sum(r.truncated for r in self.rollouts)
        return rollouts_log_level(len(self.all_rollouts), errored=self.errored, truncated=truncated)

    def summary(self) -> str:
        """Return the log line of the evaluation."""
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
        """Return the record for `metrics.jsonl`: mean reward, counts, time, and means of components."""
        values = {
            **({f"avg@{self.rollouts_per_example}": self.mean_reward} if self.rewards else {}),
            "num": len(self.rewards),
            "errored": self.errored,
            "time": round(self.seconds, 3),
        }
        components = means_over_tasks(
            [[r.outcome.components for r in task] for task in self.by_task.values()]
        )
        named = add_components(values, components)
        return {f"{prefix}/{self.env_name}/{name}": value for name, value in named.items()}


def add_components(values: Mapping[str, float], components: Mapping[str, float]) -> dict[str, float]:
    """Return `values` and `components`. A component with the name of a value becomes `component/<name>`."""
    return {
        **values,
        **{f"component/{name}" if name in values else name: c for name, c in components.items()},
    }


async def evaluate(
    env: NamedEnvironment,
    runner: RolloutRunner,
    *,
    split: str | None,
    num_examples: int,
    rollouts_per_example: int,
    known: Collection[tuple[str, int]] = (),
    on_rollout_end: Callable[[int, Rollout], None] = lambda number, rollout: None,
) -> EvalResult:
    """Run `rollouts_per_example` rollouts of the first `num_examples` tasks (-1: all) of a split.

    If `split` is None, `choose_evaluation_split` selects the split. `known` has pairs of task id and rollout
    number, and these rollouts are skipped. Call `on_rollout_end(number, rollout)` for each finished rollout.
    An exception of this function ends the evaluation.
    """
    split = choose_evaluation_split(env, split)
    started = time.monotonic()
    tasks = first_tasks(env, split, num_examples)
    return EvalResult(
        env_name=env.name,
        all_rollouts=await _run_rollouts(env, runner, tasks, rollouts_per_example, known, on_rollout_end),
        rollouts_per_example=rollouts_per_example,
        seconds=time.monotonic() - started,
        split=split,
    )


def first_tasks(env: NamedEnvironment, split: str, count: int) -> list[Task]:
    """Return the first `count` tasks of a split. -1 returns all tasks."""
    tasks = load_split(env, split)
    return [tasks[index] for index in range(len(tasks) if count < 0 else min(count, len(tasks)))]


async def _run_rollouts(
    env: NamedEnvironment,
    runner: RolloutRunner,
    tasks: Sequence[Task],
    rollouts_per_task: int,
    known: Collection[tuple[str, int]],
    on_rollout_end: Callable[[int, Rollout], None],
) -> list[Rollout]:
    """Run the rollouts that are not in `known`.

    If an environment scores groups and one rollout of a group is missing, run the whole group.
    """
    started: list[asyncio.Task[Group] | asyncio.Task[Rollout]] = []
    reports: list[asyncio.Task[Sequence[Rollout]]] = []

    async def report_end(
        running: asyncio.Task[Group] | asyncio.Task[Rollout], first: int
    ) -> Sequence[Rollout]:
        result = await running
        rollouts = result.rollouts if isinstance(result, Group) else (result,)
        for number, rollout in enumerate(rollouts, first):
            on_rollout_end(number, rollout)
        return rollouts

    for index, task in enumerate(tasks):
        missing = [number for number in range(rollouts_per_task) if (task.id, number) not in known]
        if missing and isinstance(env.environment, GroupEnvironment):
            started.append(runner.start_group(GroupTask(index=index, env=env, task=task), rollouts_per_task))
            reports.append(asyncio.create_task(report_end(started[-1], 0)))
        else:
            for number in missing:
                started.append(runner.start(env, task, index, number))
                reports.append(asyncio.create_task(report_end(started[-1], number)))
    if not reports:
        return []
    try:
        ended, _ = await asyncio.wait(reports, return_when=asyncio.FIRST_EXCEPTION)
        for report in ended:
            report.result()
        return [rollout for report in reports for rollout in report.result()]
    except BaseException:
        for running in started:
            running.cancel()
        ended, _ = await asyncio.wait(reports, timeout=CLEANUP_SECONDS)
        await asyncio.gather(*ended, return_exceptions=True)  # asyncio prints exceptions that nothing reads
        raise


def means_over_tasks(tasks: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return the mean of each named value: first over the rollouts of a task, then over the tasks.

    `tasks` has a list per task, with the values of each rollout. The mean of a value leaves out rollouts and
    tasks without this value.
    """
    task_means: dict[str, list[float]] = defaultdict(list)
    for rollouts in tasks:
        by_name: dict[str, list[float]] = defaultdict(list)
        for values in rollouts:
            for name, value in values.items():
                by_name[name].append(value)
        for name, rollout_values in by_name.items():
            task_means[name].append(statistics.fmean(rollout_values))
    return {name: statistics.fmean(means) for name, means in task_means.items()}
