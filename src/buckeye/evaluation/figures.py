"""Compute the figures of an evaluation: means, and pass@k with 95 % intervals over tasks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.evaluation.rows import EvalRow
from buckeye.monitor.intervals import Estimate, ScoredTask, cluster_of, mean_pass_at_k, mean_reward
from buckeye.orchestrator.evaluation import add_components, means_over_tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of an evaluation.

    `tasks` counts the tasks with a scored rollout. `figures` has reward and pass@k, and `means` has
    components, turns and tokens, all averaged over tasks. `stop_reasons` counts the stop reasons of all
    rollouts, and `errors` the most frequent error messages. The tokens are sums over all rollouts.
    """

    tasks: int
    scored: int
    errored: int
    figures: Mapping[str, Estimate]
    means: dict[str, float]
    stop_reasons: dict[str, int]
    errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "tasks": self.tasks,
            "scored": self.scored,
            "errored": self.errored,
            **{
                name: {"value": estimate.value, "low": estimate.low, "high": estimate.high}
                for name, estimate in self.figures.items()
            },
            "means": self.means,
            "stop_reasons": self.stop_reasons,
            "errors": self.errors,
            "tokens": {"prompt": self.prompt_tokens, "completion": self.completion_tokens},
        }


def compute_figures(rows: Sequence[EvalRow], *, rollouts_per_task: int, pass_reward: float) -> Figures:
    """Return the figures of `rollouts_per_task` rollouts per task.

    A reward of at least `pass_reward` is a pass. pass@k is omitted if a task has fewer than k scored
    rollouts.
    """
    by_task: dict[str, list[EvalRow]] = defaultdict(list)
    for row in rows:
        if row.reward is not None:
            by_task[row.task_id].append(row)
    scored = sum(map(len, by_task.values()))
    return Figures(
        tasks=len(by_task),
        scored=scored,
        errored=len(rows) - scored,
        figures=_figures(list(by_task.values()), rollouts_per_task, pass_reward),
        means=means_over_tasks([[_numbers(row) for row in task] for task in by_task.values()]),
        stop_reasons=dict(Counter(row.stop_reason for row in rows).most_common()),
        errors=dict(Counter(row.error for row in rows if row.error is not None).most_common(5)),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        completion_tokens=sum(row.completion_tokens for row in rows),
    )


def _figures(
    tasks: Sequence[Sequence[EvalRow]], rollouts_per_task: int, pass_reward: float
) -> dict[str, Estimate]:
    if not tasks:
        return {}
    scored = [
        ScoredTask(
            cluster_of(rows[0].task_id, rows[0].data),
            tuple(row.reward for row in rows if row.reward is not None),
        )
        for rows in tasks
    ]
    passed = {f"pass@{k}": mean_pass_at_k(scored, k, pass_reward=pass_reward) for k in _ks(rollouts_per_task)}
    return {
        "reward": mean_reward(scored),
        **{name: estimate for name, estimate in passed.items() if estimate is not None},
    }


def _ks(rollouts_per_task: int) -> list[int]:
    """Return 1, 2, 4, ... up to the number of rollouts per task, and the number itself."""
    return sorted({2**power for power in range(rollouts_per_task.bit_length())} | {rollouts_per_task})


def _numbers(row: EvalRow) -> dict[str, float]:
    """Return the components of a rollout with its turns, tokens, truncation and seconds."""
    counts = ("turns", "completion_tokens", "truncated", "seconds")
    return add_components({name: float(getattr(row, name)) for name in counts}, row.components)
