"""What the rollouts of an evaluation say: means and pass@k with 95 % intervals over tasks."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.monitor.intervals import cluster_of, mean_over_tasks, pass_at_k
from buckeye.orchestrator.evaluation import means_over_tasks
from buckeye_audit.evaluation.rows import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A mean over tasks with its 95 % interval."""

    name: str
    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Value and interval."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """An evaluation in numbers. `tasks` counts those with a scored rollout; `figures` begin with the reward;
    they and `means` are over tasks. `stop_reasons` counts those of all rollouts, `errors` the messages of the
    errored ones."""

    tasks: int
    scored: int
    errored: int
    figures: Sequence[Figure]
    means: dict[str, float]
    stop_reasons: dict[str, int]
    errors: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "tasks": self.tasks,
            "scored": self.scored,
            "errored": self.errored,
            **{figure.name: figure.to_json() for figure in self.figures},
            "means": self.means,
            "stop_reasons": self.stop_reasons,
            "errors": self.errors,
        }


def figures_of(rows: Sequence[Row], *, each: int, pass_reward: float) -> Figures:
    """The figures of `each` rollouts a task. A reward of at least `pass_reward` is a pass; pass@k is left out
    where a task has fewer than k scored rollouts."""
    by_task: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.reward is not None:
            by_task[row.task_id].append(row)
    scored = sum(map(len, by_task.values()))
    return Figures(
        tasks=len(by_task),
        scored=scored,
        errored=len(rows) - scored,
        figures=_figures(list(by_task.values()), each, pass_reward),
        means=means_over_tasks([[_numbers(row) for row in task] for task in by_task.values()]),
        stop_reasons=dict(Counter(row.stop_reason for row in rows).most_common()),
        errors=dict(Counter(row.error for row in rows if row.error is not None).most_common(5)),
    )


def _figures(tasks: Sequence[Sequence[Row]], each: int, pass_reward: float) -> list[Figure]:
    if not tasks:
        return []
    clusters = [cluster_of(rows[0].task_id, rows[0].data) for rows in tasks]
    rewards = [statistics.fmean(_rewards(rows)) for rows in tasks]
    found = [_figure("reward", rewards, clusters)]
    fewest = min(len(rows) for rows in tasks)
    for k in _ks(each):
        if k <= fewest:
            passed = [pass_at_k(len(rows), _passed(rows, pass_reward), k) for rows in tasks]
            found.append(_figure(f"pass@{k}", passed, clusters))
    return found


def _ks(each: int) -> list[int]:
    """1, 2, 4, ... and the number of rollouts a task itself."""
    return sorted({2**power for power in range(each.bit_length()) if 2**power <= each} | {each})


def _figure(name: str, values: Sequence[float], clusters: Sequence[str]) -> Figure:
    estimate = mean_over_tasks(values, clusters)
    return Figure(name=name, value=estimate.value, low=estimate.low, high=estimate.high)


def _numbers(row: Row) -> dict[str, float]:
    """The components of a rollout, its lengths and its time."""
    own = ("turns", "completion_tokens", "truncated", "seconds")
    return {**row.components, **{name: float(getattr(row, name)) for name in own}}


def _rewards(rows: Sequence[Row]) -> list[float]:
    return [row.reward for row in rows if row.reward is not None]


def _passed(rows: Sequence[Row], pass_reward: float) -> int:
    return sum(reward >= pass_reward for reward in _rewards(rows))
