"""Compare the exact match on held-out tasks before and after training, with 95 % intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.columns import align_columns
from buckeye.base.json_lines import read_json_lines
from buckeye.monitor.intervals import (
    Estimate,
    ScoredTask,
    cluster_of,
    mean_pass_at_k,
    paired_difference,
    pass_at_k,
)

_HEADER = ("exact match", "tasks", "clusters", "before", "after", "change", "no content")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutResult:
    """Exact match on the held-out tasks.

    `change` covers the tasks that were scored before and after training. `baseline` is the exact match of the
    best policy that ignores the question. The other values are None if no task was scored.
    """

    before: Estimate | None
    after: Estimate | None
    change: Estimate | None
    baseline: float


def read_held_out_tasks(file: Path) -> dict[str, ScoredTask]:
    """Return the scored tasks in a file of rollouts, by task id."""
    records = defaultdict(list)
    for record in read_json_lines(file):
        if record["reward"] is not None:
            records[str(record["task_id"])].append(record)
    return {
        task_id: ScoredTask(
            cluster_of(task_id, rollouts[0]["data"]),
            tuple(float(rollout["reward"]) for rollout in rollouts),
        )
        for task_id, rollouts in records.items()
    }


def compare_held_out(
    before: Mapping[str, ScoredTask], after: Mapping[str, ScoredTask], baseline: float
) -> HeldOutResult:
    """Compute the exact match before and after training, and its change."""
    both = [(before[task_id], task) for task_id, task in after.items() if task_id in before]
    return HeldOutResult(
        before=mean_pass_at_k(list(before.values()), 1),
        after=mean_pass_at_k(list(after.values()), 1),
        change=paired_difference(
            [_exact(old) for old, _ in both],
            [_exact(new) for _, new in both],
            [new.cluster for _, new in both],
        )
        if both
        else None,
        baseline=baseline,
    )


def exact_table(result: HeldOutResult) -> str:
    """Format a result as aligned text: shares in per cent, the change in points."""
    counts = ("0", "0") if result.after is None else (str(result.after.n), str(result.after.clusters))
    estimates = (_percent(result.before), _percent(result.after), _percent(result.change, "+.1f"))
    return align_columns([_HEADER, ("all tasks", *counts, *estimates, f"{100 * result.baseline:.1f}")])


def _exact(task: ScoredTask) -> float:
    return pass_at_k(len(task.rewards), sum(reward >= 1.0 for reward in task.rewards), 1)


def _percent(estimate: Estimate | None, form: str = ".1f") -> str:
    """Return an estimate with its interval, in per cent."""
    if estimate is None:
        return "-"
    shares = (estimate.value, estimate.low, estimate.high)
    value, low, high = (format(100 * share, form) for share in shares)
    return f"{value} [{low}, {high}]"
