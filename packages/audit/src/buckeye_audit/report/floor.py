"""What a policy without content scores on the very tasks that were evaluated, and on those of training."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from buckeye.envs.base import TRAIN, Environment, Probe, Task, split_names
from buckeye_audit.checks.play import Player
from buckeye_audit.checks.samples import SplitSample, family_of, read_tasks, sample_splits
from buckeye_audit.report.evaluations import Evaluation
from buckeye_audit.trivial_policies import (
    ContentFreePolicies,
    ContentFreeScore,
    content_free_policies,
    content_free_scores,
    with_constants,
)

PLAYED_PER_CELL = 200
"""Tasks of one family and split that every policy plays."""

_NO_SPLIT = "all"
_READ = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The best of the policies without content: its exact match and its name, and the best mean reward."""

    exact: float
    policy: str
    reward: float
    tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FloorTable:
    """The scores of all policies on evaluated tasks. `missing` of the evaluated tasks are not in the
    environment as it is now."""

    scores: Sequence[ContentFreeScore]
    missing: int

    def pooled(self, family: str | None, split: str | None) -> Floor | None:
        """The best policy over the tasks of a family and a split, None for all; None if none were played."""
        return _best([s for s in self.scores if family in (None, s.family) and split in (None, s.split)])


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentFree:
    """The policies that were made for an environment, the player of both, and the train split; None where
    there is none."""

    player: Player
    train: SplitSample | None
    policies: ContentFreePolicies


async def make_content_free(environment: Environment, *, seed: int = 0) -> ContentFree:
    """Make the policies; this takes seconds. Raises UsageError for an environment without tasks."""
    names = split_names(environment)
    name = TRAIN if TRAIN in names else names[0]
    sample = sample_splits(environment, [name], per_family=PLAYED_PER_CELL, seed=seed)[0]
    player = Player(environment)
    probes: Sequence[Probe] = getattr(environment, "probes", tuple)()
    policies = content_free_policies(environment, sample, probes=probes, seed=seed)
    policies = await with_constants(player, policies, sample)
    return ContentFree(player=player, train=sample if sample.is_train else None, policies=policies)


async def evaluated_floor(content_free: ContentFree, evaluation: Evaluation) -> FloorTable:
    """Play every policy on the evaluated tasks, at most `PLAYED_PER_CELL` of every family and split."""
    tasks = _find_tasks(content_free.player.environment, evaluation)
    cells: dict[str, dict[str, list[Task]]] = defaultdict(lambda: defaultdict(list))
    for task in tasks:
        cell = cells[str(task.data.get("split", _NO_SPLIT))][family_of(task)]
        if len(cell) < PLAYED_PER_CELL:
            cell.append(task)
    samples = [
        SplitSample(name=split, size=len(tasks), scanned=(), families=families)
        for split, families in cells.items()
    ]
    scores = await content_free_scores(content_free.player, content_free.policies, samples)
    return FloorTable(scores=scores, missing=len(evaluation.tasks) - len(tasks))


async def training_floor(content_free: ContentFree) -> float | None:
    """The best mean reward of a policy on the train split, families in their proportions. None if the
    environment has no train split."""
    train = content_free.train
    if train is None:
        return None
    counts: dict[str, int] = defaultdict(int)
    for task in train.scanned:
        counts[family_of(task)] += 1
    rewards: dict[str, float] = defaultdict(float)
    for score in await content_free_scores(content_free.player, content_free.policies, [train]):
        if score.scored:
            rewards[score.policy] += score.mean * counts[score.family] / len(train.scanned)
    return max(rewards.values(), default=None)


def _find_tasks(environment: Environment, evaluation: Evaluation) -> list[Task]:
    """The evaluated tasks, which are the first ones of their split."""
    tasks = read_tasks(environment, str(evaluation.measured.get("split", "eval")))
    wanted = set(evaluation.tasks)
    found: dict[str, Task] = {}
    for index in itertools.islice(range(len(tasks)), _READ):
        if len(found) == len(wanted):
            break
        task = tasks[index]
        if task.id in wanted:
            found[task.id] = task
    return list(found.values())


def _best(scores: Sequence[ContentFreeScore]) -> Floor | None:
    exact: dict[str, float] = defaultdict(float)
    reward: dict[str, float] = defaultdict(float)
    scored: dict[str, int] = defaultdict(int)
    for score in scores:
        if score.scored:
            exact[score.policy] += score.exact * score.scored
            reward[score.policy] += score.total
            scored[score.policy] += score.scored
    if not scored:
        return None
    tasks = max(scored.values())  # a policy that could not play some of them earned nothing there
    best = max(exact, key=lambda name: exact[name])
    return Floor(exact=exact[best] / tasks, policy=best, reward=max(reward.values()) / tasks, tasks=tasks)
