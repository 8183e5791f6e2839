"""The figures of a report: one row for all tasks, for every family, every split, and both together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from buckeye.monitor.intervals import Estimate, mean_passed, paired_difference
from buckeye_audit.report.evaluations import Evaluation, TaskResult
from buckeye_audit.report.floor import Floor, FloorTable

ALL = "all tasks"
FEW_CLUSTERS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class PassAt:
    """pass@k over the `tasks` that have at least k scored rollouts; None without any."""

    k: int
    value: float | None
    tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The tasks of one row in one evaluation. Means are over tasks, and None if nothing was scored.

    `ortho_miss` is how often a scored rollout has the right word in a wrong spelling, None if the environment
    does not count that. `truncated` and `errored` count rollouts out of `rollouts`.
    """

    tasks: int
    rollouts: int
    exact: Estimate | None
    mean_reward: float | None
    pass_at: tuple[PassAt, ...]
    ortho_miss: float | None
    truncated: int
    errored: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Before, after, and the change on the tasks that were scored in both. `family` or `split` is None where
    a row is about all of them."""

    family: str | None
    split: str | None
    before: Side | None
    after: Side
    change: Estimate | None
    content_free: Floor | None

    @property
    def label(self) -> str:
        """How the row is called."""
        return " / ".join(part for part in (self.family, self.split) if part is not None) or ALL

    @property
    def verdict(self) -> str:
        """ "rose" or "fell" if the interval of the change leaves out 0; else "unclear"."""
        if self.change is None or self.change.low <= 0.0 <= self.change.high:
            return "unclear"
        return "rose" if self.change.value > 0 else "fell"

    @property
    def above_floor(self) -> bool | None:
        """Whether all of the interval after is above what a policy without content scores."""
        if self.content_free is None or self.after.exact is None:
            return None
        return self.after.exact.low > self.content_free.exact

    @property
    def clusters(self) -> int:
        """How many clusters of related tasks were scored after."""
        return self.after.exact.clusters if self.after.exact is not None else 0

    @property
    def thin(self) -> bool:
        """Whether there are few clusters, or one that holds most of the tasks."""
        exact = self.after.exact
        return exact is None or exact.clusters < FEW_CLUSTERS or 2 * exact.largest > exact.n


def make_rows(
    before: Evaluation | None, after: Evaluation, floors: FloorTable | None, split_order: Sequence[str] = ()
) -> list[Row]:
    """All rows: all tasks, then by family, by split, by both. A division into one part makes no rows."""
    olds: Sequence[TaskResult] = list(before.tasks.values()) if before is not None else []
    news = list(after.tasks.values())
    both = [*olds, *news]
    families = _parts((task.family for task in both), ())
    splits = _parts((task.split for task in both), split_order)
    keys: list[tuple[str | None, str | None]] = [(None, None)]
    keys += [(family, None) for family in families]
    keys += [(None, split) for split in splits]
    here = {(task.family, task.split) for task in both}
    keys += [(f, s) for f in families for s in splits if (f, s) in here]
    ks = _powers_of_two(max(task.played for task in both))
    return [
        Row(
            family=family,
            split=split,
            before=_side(_only(olds, family, split), ks) if before is not None else None,
            after=_side(_only(news, family, split), ks),
            change=_change(_only(olds, family, split), _only(news, family, split)),
            content_free=floors.pooled(family, split) if floors is not None else None,
        )
        for family, split in keys
    ]


def exact_by_split(evaluation: Evaluation, split_order: Sequence[str] = ()) -> dict[str | None, Estimate]:
    """Exact match of all tasks under None, and of every split."""
    tasks = list(evaluation.tasks.values())
    splits: list[str | None] = [None, *_parts((task.split for task in tasks), split_order)]
    scored = [task for task in tasks if task.rewards]
    estimates = {split: mean_passed(_only(scored, None, split), 1) for split in splits}
    return {split: estimate for split, estimate in estimates.items() if estimate is not None}


def _parts(names: Iterable[str | None], order: Sequence[str]) -> list[str]:
    """The distinct names, in `order` as far as it goes; none if there is only one."""
    rank: Mapping[str, int] = {name: i for i, name in enumerate(order)}
    found = sorted({n for n in names if n is not None}, key=lambda n: (rank.get(n, len(rank)), n))
    return found if len(found) > 1 else []


def _only(tasks: Sequence[TaskResult], family: str | None, split: str | None) -> list[TaskResult]:
    return [t for t in tasks if family in (None, t.family) and split in (None, t.split)]


def _powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(max(most, 1).bit_length())]


def _side(tasks: Sequence[TaskResult], ks: Sequence[int]) -> Side:
    scored = [task for task in tasks if task.rewards]
    misses = [task.misses / len(task.rewards) for task in scored if task.misses is not None]
    return Side(
        tasks=len(tasks),
        rollouts=sum(task.played for task in tasks),
        exact=mean_passed(scored, 1),
        mean_reward=statistics.fmean(statistics.fmean(task.rewards) for task in scored) if scored else None,
        pass_at=tuple(_pass_at(tasks, k) for k in ks),
        ortho_miss=statistics.fmean(misses) if misses else None,
        truncated=sum(task.truncated for task in tasks),
        errored=sum(task.errored for task in tasks),
    )


def _pass_at(tasks: Sequence[TaskResult], k: int) -> PassAt:
    enough = [task for task in tasks if len(task.rewards) >= k]
    estimate = mean_passed(enough, k)
    return PassAt(k=k, value=None if estimate is None else estimate.value, tasks=len(enough))


def _change(olds: Sequence[TaskResult], news: Sequence[TaskResult]) -> Estimate | None:
    old = {task.id: task for task in olds if task.rewards}
    pairs = [(old[task.id], task) for task in news if task.rewards and task.id in old]
    if not pairs:
        return None
    return paired_difference(
        [a.exact for a, _ in pairs], [b.exact for _, b in pairs], [b.cluster for _, b in pairs]
    )
