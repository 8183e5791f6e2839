"""The honesty check of an environment: are its tasks what they claim, and are its rewards earned?

What is checked is listed in docs/environments.md. Everything is seeded; nothing needs a model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from buckeye.envs.base import Environment, Task
from buckeye.envs.baselines import ContentFreeScore, content_free_policies, content_free_scores
from buckeye.envs.honesty.fingerprint import fingerprint, fingerprint_elsewhere
from buckeye.envs.honesty.play import Player, ScriptedPolicy, outcome_with
from buckeye.envs.honesty.play_checks import (
    ProbeResult,
    check_all_graded,
    check_content_free,
    check_errors_unscored,
    check_paid,
    check_probes,
    check_range,
    check_same_grade,
    play_probes,
    played_twice,
)
from buckeye.envs.honesty.result import CheckResult
from buckeye.envs.honesty.samples import SplitSample, probes_of, read_tasks, sample_splits, split_names
from buckeye.envs.honesty.task_checks import check_answers_hidden, check_apart, check_ids, check_same_tasks
from buckeye.envs.registry import load_environment

MOST_PLAYED = 300
_SECONDS, _ROLLOUTS_OF_A_TASK = 120.0, 40


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """`sample`: tasks of each family and split; None is `MOST_PLAYED`, or fewer where rollouts are slow.
    `limit`: the highest mean reward of a content-free policy."""

    sample: int | None
    limit: float
    seed: int = 0
    progress: Callable[[str], None] = field(default=lambda _: None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All checks of an environment, with the numbers behind two of them."""

    environment: str
    sample: int
    sizes: Mapping[str, int]
    checks: Sequence[CheckResult]
    probes: Sequence[ProbeResult]
    scores: Sequence[ContentFreeScore]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "fail" for check in self.checks)

    def best_scores(self) -> dict[tuple[str, str], ContentFreeScore]:
        """(family, split) -> the content-free policy with the highest mean reward there."""
        best: dict[tuple[str, str], ContentFreeScore] = {}
        for score in self.scores:
            key = score.family, score.split
            if key not in best or not score.mean <= best[key].mean:
                best[key] = score
        return best

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; a mean that does not exist is null."""
        return {
            "environment": self.environment,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "splits": dict(self.sizes),
            "sample": self.sample,
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
                }
                for score in self.scores
            ],
        }


async def check_environment(env_id: str, args: Mapping[str, Any], options: CheckOptions) -> Report:
    """Load an environment and run every check that needs no model.

    Raises UsageError if it cannot be loaded, or cannot give the tasks of its splits.
    """
    started = time.monotonic()
    environment, seed = load_environment(env_id, **args), options.seed
    names = split_names(environment)
    sample = options.sample or await _affordable(environment, read_tasks(environment, names[0])[0])
    options.progress("reading tasks")
    samples = sample_splits(environment, names, per_family=sample, seed=seed)
    here = fingerprint(environment, names, seed)
    second = load_environment(env_id, **args)
    again = [lambda: fingerprint(environment, names, seed), lambda: fingerprint(second, names, seed)]
    checks = [check_ids(samples), check_same_tasks(here, again, "when made again")]
    options.progress("reading tasks in a second process")
    elsewhere = [lambda: fingerprint_elsewhere(env_id, args, names, seed)]
    checks += [
        check_same_tasks(here, elsewhere, "in another process"),
        check_apart(samples),
        check_answers_hidden(samples),
    ]
    played, probes, scores = await _play(environment, second, samples, options)
    return Report(
        environment=environment.name,
        sample=sample,
        sizes={sample.name: sample.size for sample in samples},
        checks=[*checks, *played],
        probes=probes,
        scores=scores,
        seconds=time.monotonic() - started,
    )


async def _affordable(environment: Environment, task: Task) -> int:
    """How many tasks of each family and split can be played in about `_SECONDS`."""
    started = time.monotonic()
    await outcome_with(environment, task, ScriptedPolicy(""))
    rollout = time.monotonic() - started
    return max(1, min(MOST_PLAYED, int(_SECONDS / (_ROLLOUTS_OF_A_TASK * rollout))))


async def _play(
    environment: Environment, second: Environment, samples: Sequence[SplitSample], options: CheckOptions
) -> tuple[list[CheckResult], list[ProbeResult], list[ContentFreeScore]]:
    player, probes = Player(environment), probes_of(environment)
    options.progress("playing probes")
    results = await play_probes(player, probes)
    options.progress("looking for the best constant")
    shown = next((sample for sample in samples if sample.is_train), samples[0])
    policies = await content_free_policies(player, shown, probes=probes, seed=options.seed)
    paid = await check_paid(player, samples, policies.formats)
    before = await played_twice(player, samples, policies.formats, probes)
    scores = await content_free_scores(player, policies, samples, progress=options.progress)
    options.progress("grading again")
    checks = [
        check_probes(results),
        paid,
        await check_same_grade([environment, second], before),
        check_all_graded(player),
        await check_errors_unscored(environment, samples),
        check_range(player),
        check_content_free(scores, options.limit, samples),
    ]
    return checks, results, scores


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
