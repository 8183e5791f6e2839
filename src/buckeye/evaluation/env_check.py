"""Run all checks of `buckeye env check`: are the tasks valid, and do the rewards measure the task?

docs/how-to/check-environments.md lists the checks. All checks are seeded and need no model.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from buckeye.base.process_guard import GUARD
from buckeye.envs.base import Environment, split_names
from buckeye.envs.settings import with_variables
from buckeye.evaluation import content_free
from buckeye.evaluation.checks import rollout_checks, task_checks
from buckeye.evaluation.checks.chance import chance_by_group
from buckeye.evaluation.checks.fingerprint import fingerprint, fingerprint_in_new_process
from buckeye.evaluation.checks.found_answers import with_found_answers
from buckeye.evaluation.checks.judge_bias import JudgeBias, measure_judge
from buckeye.evaluation.checks.later_messages import check_later_messages
from buckeye.evaluation.checks.result import CheckResult, CheckStatus
from buckeye.evaluation.checks.samples import SplitSample, probes_of, read_probes, sample_splits
from buckeye.evaluation.checks.scripted_runner import ScriptedRunner
from buckeye.monitor.verdicts import verdict
from buckeye.workers.environment import WorkerEnvironment
from buckeye.workers.loading import open_environment

MAX_SAMPLE = 300
_ISOLATION_SHARE = 0.5  # time of `check_isolated`, relative to `budget` and in addition to it
_ANSWERS_SHARE = 0.1  # time to find answers under an unknown key, in addition to the budget
_PROCESS_SECONDS = 60.0  # a new process needs time for imports


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """Options of `check_environment`.

    At most `sample` tasks of each family and split are run. The mean reward of a policy that ignores the
    question may be at most `limit` above chance. `budget` is the time for all rollouts, in seconds.
    `variables` names the environment variables that the environment receives. `probes` is a file with more
    probes.
    """

    sample: int = MAX_SAMPLE
    limit: float = 0.03
    budget: float = 60.0
    seed: int = 0
    variables: tuple[str, ...] = ()
    probes: Path | None = None
    progress: Callable[[str], None] = field(default=lambda _: None)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvCheckReport:
    """All checks of an environment, with their data.

    `missed` counts, by phase, the rollouts that did not end before the deadline. `rollouts` counts the
    finished rollouts, and `errored` those with an error.
    """

    environment: str
    options: CheckOptions
    sizes: Mapping[str, int]
    checks: Sequence[CheckResult]
    probes: Sequence[rollout_checks.ProbeResult]
    judge: Sequence[JudgeBias]
    scores: Sequence[content_free.ContentFreeScore]
    chance: Mapping[tuple[str, str], float]
    missed: Mapping[str, int]
    rollouts: int
    errored: int
    seconds: float

    @property
    def counts(self) -> Counter[CheckStatus]:
        """Number of checks by status."""
        return Counter(check.status for check in self.checks)

    @property
    def passed(self) -> bool:
        """True if at least one check ran and no check found an error."""
        return verdict(len(self.checks) - self.counts["not run"], self.counts["error"]) == "passed"

    def best_scores(self) -> dict[tuple[str, str], content_free.ContentFreeScore]:
        """Return the content-free policy with the highest mean reward by (family, split)."""
        known = [score for score in self.scores if not math.isnan(score.mean)]
        return {(score.family, score.split): score for score in sorted(known, key=lambda score: score.mean)}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; an undefined mean is null."""
        return {
            "environment": self.environment,
            "passed": self.passed,
            "errors": self.counts["error"],
            "warnings": self.counts["warning"],
            "notes": self.counts["note"],
            "seconds": round(self.seconds, 1),
            "splits": dict(self.sizes),
            "sample": self.options.sample,
            "budget": self.options.budget,
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
                    "got": _number(result.reward),
                    "error": result.error,
                    "passed": result.is_expected,
                }
                for result in self.probes
            ],
            "judge": [asdict(bias) for bias in self.judge],
            "content_free": [
                {
                    "split": score.split,
                    "family": score.family,
                    "policy": score.policy,
                    "tasks": score.scored,
                    "errored": score.errored,
                    "mean": _number(score.mean),
                    "exact": _number(score.exact),
                    "chance": self.chance[score.group],
                }
                for score in self.scores
            ],
        }


async def check_environment(
    env_id: str, args: Mapping[str, Any], options: CheckOptions, opened: Environment | None = None
) -> EnvCheckReport:
    """Run every check of an environment that needs no model. Load it, unless the caller has `opened` it.

    Raise `UsageError` if the environment, or the tasks of its splits, cannot be loaded.
    """
    started = time.monotonic()
    settings, seed = with_variables(options.variables), options.seed
    GUARD.mark_children()
    environment = open_environment(env_id, args, settings) if opened is None else opened
    names = split_names(environment)
    options.progress("reading tasks")
    samples = sample_splits(environment, names, per_family=options.sample, seed=seed)
    finder = ScriptedRunner(environment)
    finder.begin_phase("answers", time.monotonic() + _ANSWERS_SHARE * options.budget)
    samples = await with_found_answers(finder, samples)
    seconds = max(options.budget, _PROCESS_SECONDS)
    other_process = None
    if not isinstance(environment, WorkerEnvironment):  # `second` is in another process, too
        program = asyncio.to_thread(
            fingerprint_in_new_process, env_id, args, names, seed, seconds, options.variables
        )
        other_process = asyncio.create_task(program)
        await asyncio.sleep(0)  # start the task now; it runs concurrently with the rollouts
    reference = fingerprint(environment, names, seed)
    second = open_environment(env_id, args, settings)
    repeated = [fingerprint(environment, names, seed), fingerprint(second, names, seed)]
    tools = await rollout_checks.check_tools(environment)
    options.progress("comparing sequential and concurrent rollouts")
    isolated = await rollout_checks.check_isolated(environment, _ISOLATION_SHARE * options.budget)
    rollout_report = await _run_rollout_checks([environment, second], samples, options)
    options.progress("reading tasks in a second process")
    in_process = repeated[1] if other_process is None else await other_process
    checks = [
        task_checks.check_ids(samples),
        task_checks.check_tasks_repeatable(reference, repeated, "when loaded again"),
        task_checks.check_tasks_repeatable(reference, [in_process], "in another process"),
        task_checks.check_splits_disjoint(samples),
        task_checks.check_answers_hidden(samples, options.limit, seed),
    ]
    return replace(
        rollout_report,
        sizes={sample.name: sample.size for sample in samples},
        checks=[*checks, *tools, *isolated, *rollout_report.checks],
        seconds=time.monotonic() - started,
    )


async def _run_rollout_checks(
    environments: Sequence[Environment], samples: Sequence[SplitSample], options: CheckOptions
) -> EnvCheckReport:
    """Run the checks that need rollouts, most informative first.

    Each phase may use a share of the budget, and the time that earlier phases did not use.
    """
    runners = [ScriptedRunner(environment) for environment in environments]
    runner, started = runners[0], time.monotonic()

    def begin_phase(name: str, until: float) -> None:
        options.progress(name)
        for each in runners:
            each.begin_phase(name, started + until * options.budget)

    offered = [*probes_of(runner.environment), *read_probes(runner.environment, options.probes)]
    probes = [probe for probe in offered if probe.component is None]
    labels = [probe for probe in offered if probe.component is not None]
    shown = next((sample for sample in samples if sample.is_train), samples[0])
    policies = content_free.content_free_policies(runner.environment, shown, probes=probes, seed=options.seed)
    begin_phase("probes", 0.15)
    results = await rollout_checks.run_probes(runner, probes)
    begin_phase("a failing engine", 0.25)
    unscored = await rollout_checks.check_errors_unscored(runner, samples)
    later = await check_later_messages(runner, samples)
    begin_phase("accepted answers", 0.4)
    rewarded = await rollout_checks.check_answers_rewarded(runner, samples, policies.formats)
    begin_phase("repeated replies", 0.55)
    same_grade = await rollout_checks.check_grades_repeatable(runners, samples, policies.formats, probes)
    begin_phase("bias of the judge", 0.65)
    judged, biases = await measure_judge(runner, samples, policies.formats[-1], options.limit, labels)
    begin_phase("content-free policies", 0.8)
    scores = await content_free.score_content_free(runner, policies, samples, progress=options.progress)
    begin_phase("search for the best constant", 0.9)
    policies = await content_free.choose_constant_replies(runner, policies, shown)
    begin_phase("the best constant", 1.0)
    scores += await content_free.score_content_free(
        runner, policies, samples, only=[content_free.CONSTANT_REPLY], progress=options.progress
    )
    chance = chance_by_group(samples)
    return EnvCheckReport(
        environment=runner.environment.name,
        options=options,
        sizes={},
        checks=[
            rollout_checks.check_probes(results, len(probes)),
            rewarded,
            same_grade,
            rollout_checks.check_all_graded(runner),
            unscored,
            rollout_checks.check_reward_range(runner),
            *judged,
            *later,
            rollout_checks.check_content_free(scores, options.limit, chance),
        ],
        probes=results,
        judge=biases,
        scores=scores,
        chance=chance,
        missed=sum((runner.missed for runner in runners), Counter()),
        rollouts=sum(runner.rollouts for runner in runners),
        errored=sum(len(runner.errored) for runner in runners),
        seconds=0.0,
    )


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
