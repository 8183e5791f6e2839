"""Baseline for the held-out tasks: exact match of the best policy that does not read the task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from buckeye.envs.base import TRAIN, Environment, Task
from buckeye.evaluation.checks.samples import SplitSample, family_of, probes_of, sample_splits
from buckeye.evaluation.checks.scripted_runner import ScriptedRunner
from buckeye.evaluation.content_free import (
    choose_constant_replies,
    content_free_policies,
    score_content_free,
)

_MAX_TASKS = 200
"""Maximum number of tasks per family and split for each policy."""


async def measure_baseline(
    environment: Environment, split: str, evaluated: Collection[str], *, seed: int = 0
) -> float:
    """Run every content-free policy of `buckeye env check` on the evaluated tasks of a split.

    Returns the exact match of the best policy. The policies are made from train tasks only.
    Raises UsageError if the environment has no train split.
    """
    runner = ScriptedRunner(environment)
    train = sample_splits(environment, [TRAIN], per_family=_MAX_TASKS, seed=seed)[0]
    content_free = content_free_policies(environment, train, probes=probes_of(environment), seed=seed)
    policies = await choose_constant_replies(runner, content_free, train)
    tasks = [task for task in environment.tasks(split) if task.id in evaluated]
    passed, scored = defaultdict[str, float](float), defaultdict[str, int](int)
    for score in await score_content_free(runner, policies, _samples(tasks)):
        if score.scored:
            passed[score.policy] += score.exact * score.scored
            scored[score.policy] += score.scored
    # a task that a policy could not answer counts as failed
    return max(passed.values()) / max(scored.values())


def _samples(tasks: Sequence[Task]) -> list[SplitSample]:
    """Group the tasks by the split and the family in their data."""
    cells: dict[str, dict[str, list[Task]]] = defaultdict(lambda: defaultdict(list))
    for task in tasks:
        cell = cells[str(task.data.get("split"))][family_of(task)]
        if len(cell) < _MAX_TASKS:
            cell.append(task)
    return [
        SplitSample(name=split, size=len(tasks), scanned=(), families=families)
        for split, families in cells.items()
    ]
