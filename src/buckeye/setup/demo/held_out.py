"""Held-out tasks before and after training: exact match by family and by split, with 95 % intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.columns import align_columns
from buckeye.base.json_lines import read_json_lines
from buckeye.monitor.intervals import Estimate, ScoredTask, cluster_of, mean_pass_at_k, paired_difference

ALL = "all tasks"
_HEADER = ("exact match", "tasks", "clusters", "before", "after", "change", "no content")

Part = tuple[str | None, str | None]
"""A family and a split of tasks. None: all families, or all splits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutTask(ScoredTask):
    """The rewards of at least one scored rollout of a task, with the task's family and split."""

    family: str | None
    split: str | None

    @property
    def exact(self) -> float:
        """Share of the rollouts with a reward of at least 1."""
        return sum(reward >= 1.0 for reward in self.rewards) / len(self.rewards)

    def is_in(self, part: Part) -> bool:
        """Return True if the task belongs to a part."""
        family, split = part
        return family in (None, self.family) and split in (None, self.split)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRow:
    """One part of the tasks.

    `change` covers the tasks scored both times. `baseline` is the exact match of the best content-free
    policy. Values are None if nothing was scored.
    """

    part: Part
    before: Estimate | None
    after: Estimate | None
    change: Estimate | None
    baseline: float | None

    @property
    def label(self) -> str:
        """Name of the part."""
        return " / ".join(name for name in self.part if name is not None) or ALL


def read_held_out_tasks(file: Path) -> dict[str, HeldOutTask]:
    """Read the rollouts of an evaluation (`evals/NAME.jsonl`): task id -> its scored rollouts."""
    records = defaultdict(list)
    for record in read_json_lines(file):
        if record["reward"] is not None:
            records[str(record["task_id"])].append(record)
    return {
        task_id: HeldOutTask(
            family=rollouts[0]["data"].get("family"),
            split=rollouts[0]["data"].get("split"),
            cluster=cluster_of(task_id, rollouts[0]["data"]),
            rewards=tuple(float(rollout["reward"]) for rollout in rollouts),
        )
        for task_id, rollouts in records.items()
    }


def parts_of(tasks: Iterable[HeldOutTask]) -> Iterator[Part]:
    """Yield every family, every split, and all tasks. A dimension with a single value is skipped."""
    all_tasks = list(tasks)
    families = sorted({task.family for task in all_tasks if task.family is not None})
    splits = sorted({task.split for task in all_tasks if task.split is not None})
    yield from ((family, None) for family in families if len(families) > 1)
    yield from ((None, split) for split in splits if len(splits) > 1)
    yield None, None


def make_rows(
    before: Mapping[str, HeldOutTask],
    after: Mapping[str, HeldOutTask],
    baselines: Mapping[Part, float],
) -> list[HeldOutRow]:
    """Compute a row for each part of the tasks."""
    both = [(before[task_id], task) for task_id, task in after.items() if task_id in before]
    return [
        HeldOutRow(
            part=part,
            before=_exact(before.values(), part),
            after=_exact(after.values(), part),
            change=_change([(old, new) for old, new in both if new.is_in(part)]),
            baseline=baselines.get(part),
        )
        for part in parts_of([*before.values(), *after.values()])
    ]


def exact_table(rows: Sequence[HeldOutRow]) -> str:
    """Format rows as aligned text: shares in per cent, changes in points."""
    return align_columns([_HEADER, *map(_cells, rows)])


def _exact(tasks: Iterable[HeldOutTask], part: Part) -> Estimate | None:
    return mean_pass_at_k([task for task in tasks if task.is_in(part)], 1)


def _change(pairs: Sequence[tuple[HeldOutTask, HeldOutTask]]) -> Estimate | None:
    if not pairs:
        return None
    return paired_difference(
        [old.exact for old, _ in pairs], [new.exact for _, new in pairs], [new.cluster for _, new in pairs]
    )


def _cells(row: HeldOutRow) -> tuple[str, ...]:
    counts = ("0", "0") if row.after is None else (str(row.after.n), str(row.after.clusters))
    estimates = (_percent(row.before, ".1f"), _percent(row.after, ".1f"), _percent(row.change, "+.1f"))
    baseline = "-" if row.baseline is None else f"{100 * row.baseline:.1f}"
    return (row.label, *counts, *estimates, baseline)


def _percent(estimate: Estimate | None, form: str) -> str:
    """Return an estimate with its interval, in per cent."""
    if estimate is None:
        return "-"
    shares = (estimate.value, estimate.low, estimate.high)
    value, low, high = (format(100 * share, form) for share in shares)
    return f"{value} [{low}, {high}]"
