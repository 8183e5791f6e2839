"""Honesty check of an environment: are its tasks valid, and do its rewards measure the task?

docs/how-to/check-environments.md lists the checks. All are seeded and need no model.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from buckeye.base.process_guard import GUARD
from buckeye.envs.base import Environment, split_names
from buckeye.envs.settings import with_variables
from buckeye.errors import RunError
from buckeye.evaluation.checks.chance import Chance, chances
from buckeye.evaluation.checks.fingerprint import Fingerprint, fingerprint, fingerprint_elsewhere
from buckeye.evaluation.checks.play import Player
from buckeye.evaluation.checks.play_checks import (
    ProbeResult,
    check_all_graded,
    check_content_free,
    check_errors_unscored,
    check_isolated,
    check_paid,
    check_probes,
    check_range,
    check_same_grade,
    is_over,
    play_probes,
)
from buckeye.evaluation.checks.result import CheckResult, count_of
from buckeye.evaluation.checks.samples import SplitSample, probes_of, sample_splits
from buckeye.evaluation.checks.task_checks import (
    check_answers_hidden,
    check_apart,
    check_ids,
    check_same_tasks,
)
from buckeye.evaluation.trivial_policies import (
    ONE_STRING,
    ContentFreeScore,
    content_free_policies,
    content_free_scores,
    with_constants,
)
from buckeye.monitor.signals import verdict
from buckeye.workers.opening import open_environment

MOST_PLAYED = 300
_ISOLATION_SHARE = 0.5  # share of the rollout budget, in addition to it
_PROCESS_SECONDS = 20.0  # time to start a second process and import


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """Options of the honesty check.

    At most `sample` tasks of each family and split are run. `limit` is the tolerated mean reward of a
    content-free policy above chance. `budget` is the seconds for rollouts. `variables` names the environment
    variables to pass on.
    """

    sample: int = MOST_PLAYED
    limit: float
    budget: float = 60.0
    seed: int = 0
    variables: tuple[str, ...] = ()
    progress: Callable[[str], None] = field(default=lambda _: None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All checks of an environment, with the data behind them.

    `over` has the groups of `scores` above chance. `missed` counts the rollouts without time, by phase.
    `errored` of the `rollouts` that ran have an error.
    """

    environment: str
    sample: int
    budget: float
    sizes: Mapping[str, int]
    checks: Sequence[CheckResult]
    probes: Sequence[ProbeResult]
    scores: Sequence[ContentFreeScore]
    chance: Mapping[tuple[str, str], Chance]
    over: frozenset[tuple[str, str]]
    missed: Mapping[str, int]
    rollouts: int
    errored: int
    seconds: float

    @property
    def passed(self) -> bool:
        """True if at least one check ran and none found an error."""
        looked = len(self.checks) - count_of(self.checks, "not run")
        return verdict(looked, count_of(self.checks, "error")) == "passed"

    def best_scores(self) -> dict[tuple[str, str], ContentFreeScore]:
        """Return the content-free policy with the highest mean reward by (family, split)."""
        best: dict[tuple[str, str], ContentFreeScore] = {}
        for score in self.scores:
            if math.isnan(score.mean):
                continue
            key = score.family, score.split
            if key not in best or score.mean > best[key].mean:
                best[key] = score
        return best

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; an undefined mean is null."""
        return {
            "environment": self.environment,
            "passed": self.passed,
            **{f"{status}s": count_of(self.checks, status) for status in ("error", "warning", "note")},
            "seconds": round(self.seconds, 1),
            "splits": dict(self.sizes),
            "sample": self.sample,
            "budget": self.budget,
            "no_time_for": dict(self.missed),
            "rollouts": self.rollouts,
            "errored": self.errored,
            "checks": [asdict(check) for check in self.checks],
            "probes": [
                {
                    "name": result.probe.name,
                    "task": result.probe.task.id,
                    "reply": result.probe.reply,
                    "low": result.probe.low,
                    "high": result.probe.high,
                    "got": _number(result.got),
                    "error": result.error,
                    "passed": result.ok,
                }
                for result in self.probes
            ],
            "content_free": [
                {
                    "split": score.split,
                    "family": score.family,
                    "policy": score.policy,
                    "tasks": score.scored,
                    "errored": score.errored,
                    "mean": _number(score.mean),
                    "exact": _number(score.exact),
                    "chance": self.chance[score.group].share,
                }
                for score in self.scores
            ],
        }


async def check_environment(env_id: str, args: Mapping[str, Any], options: CheckOptions) -> Report:
    """Load an environment and run every check that needs no model.

    Raise `UsageError` if the environment, or the tasks of its splits, cannot be loaded.
    """
    started = time.monotonic()
    settings, seed = with_variables(options.variables), options.seed
    GUARD.mark_children()
    environment = open_environment(env_id, args, settings)
    names = split_names(environment)
    options.progress("reading tasks")
    samples = sample_splits(environment, names, per_family=options.sample, seed=seed)
    here = fingerprint(environment, names, seed)
    second = open_environment(env_id, args, settings)
    again = [fingerprint(environment, names, seed), fingerprint(second, names, seed)]
    elsewhere = asyncio.create_task(_elsewhere(env_id, args, names, options))
    await asyncio.sleep(0)  # start the task now; it runs concurrently with the rollouts
    options.progress("the same rollouts alone and side by side")
    isolated = await check_isolated(environment, _ISOLATION_SHARE * options.budget)
    played = await _play([environment, second], samples, options)
    options.progress("reading tasks in a second process")
    checks = [
        check_ids(samples),
        check_same_tasks(here, again, "when made again"),
        check_same_tasks(here, [await elsewhere], "in another process"),
        check_apart(samples),
        check_answers_hidden(samples, options.limit, seed),
    ]
    return replace(
        played,
        sizes={sample.name: sample.size for sample in samples},
        checks=[*checks, *isolated, *played.checks],
        seconds=time.monotonic() - started,
    )


async def _elsewhere(
    env_id: str, args: Mapping[str, Any], names: Sequence[str], options: CheckOptions
) -> Fingerprint | RunError | None:
    seconds = max(options.budget, _PROCESS_SECONDS)
    try:
        return await asyncio.to_thread(
            fingerprint_elsewhere, env_id, args, names, options.seed, seconds, options.variables
        )
    except RunError as error:
        return error


class _Phases:
    """Phases with rollouts, each with a deadline at a share of the budget; unused time passes to the next."""

    def __init__(self, players: Sequence[Player], options: CheckOptions) -> None:
        self._players, self._options, self._started = players, options, time.monotonic()

    def begin(self, what: str, until: float) -> None:
        self._options.progress(what)
        for player in self._players:
            player.begin(what, self._started + until * self._options.budget)


async def _play(
    environments: Sequence[Environment], samples: Sequence[SplitSample], options: CheckOptions
) -> Report:
    """Run the checks that need rollouts, the most informative per rollout first."""
    players = [Player(environment) for environment in environments]
    player, phases = players[0], _Phases(players, options)
    probes = probes_of(player.environment)
    shown = next((sample for sample in samples if sample.is_train), samples[0])
    policies = content_free_policies(player.environment, shown, probes=probes, seed=options.seed)
    phases.begin("probes", 0.15)
    results = await play_probes(player, probes)
    phases.begin("a failing engine", 0.25)
    unscored = await check_errors_unscored(player, samples)
    phases.begin("accepted answers", 0.4)
    paid = await check_paid(player, samples, policies.formats)
    phases.begin("the same replies again", 0.55)
    same_grade = await check_same_grade(players, samples, policies.formats, probes)
    phases.begin("policies without content", 0.8)
    scores = await content_free_scores(player, policies, samples, progress=options.progress)
    phases.begin("looking for the best constant", 0.9)
    policies = await with_constants(player, policies, shown)
    phases.begin("the best constant", 1.0)
    scores += await content_free_scores(
        player, policies, samples, only=[ONE_STRING], progress=options.progress
    )
    chance = chances(samples)
    return Report(
        environment=player.environment.name,
        sample=options.sample,
        budget=options.budget,
        sizes={},
        checks=[
            check_probes(results, len(probes)),
            paid,
            same_grade,
            check_all_graded(player),
            unscored,
            check_range(player),
            check_content_free(scores, options.limit, chance),
        ],
        probes=results,
        scores=scores,
        chance=chance,
        over=frozenset(s.group for s in scores if is_over(s, options.limit, chance, len(scores))),
        missed=sum((player.missed for player in players), Counter()),
        rollouts=sum(player.rollouts for player in players),
        errored=sum(len(player.errored) for player in players),
        seconds=0.0,
    )


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
