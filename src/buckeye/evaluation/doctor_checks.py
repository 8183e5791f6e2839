"""Checks of `rl doctor` that run rollouts.

`check_environments` runs `buckeye env check`. `check_spread` runs groups of rollouts with the model.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Iterator

from buckeye.base.columns import counted
from buckeye.config.environments import TrainEnvConfig
from buckeye.config.inference import InferenceConfig, ServedModelConfig
from buckeye.config.rl import RLConfig
from buckeye.envs.base import TRAIN
from buckeye.errors import BuckeyeError
from buckeye.evaluation.chat_policy import ChatSampling, chat_rollout_runner
from buckeye.evaluation.checks.result import shortened
from buckeye.evaluation.checks.rollout_checks import TASK_TOOLS
from buckeye.evaluation.env_check import CheckOptions, check_environment
from buckeye.evaluation.run_eval import model_server
from buckeye.launch.preflight.check import Check, failed, failed_with, ok, skipped, warning
from buckeye.launch.preflight.doctor import PreflightCheck, PreflightContext
from buckeye.launch.preflight.memory_check import MEMORY
from buckeye.launch.preflight.task_checks import task_check_name
from buckeye.monitor.finding import advice_of, cause_of
from buckeye.monitor.intervals import is_pass
from buckeye.monitor.learning_findings import explain_no_spread
from buckeye.monitor.verdicts import verdict
from buckeye.orchestrator.environments import check_command, load_environments
from buckeye.orchestrator.evaluation import EvalResult, evaluate

SPREAD = "group spread"
_SAMPLE = 20  # tasks per family and split; `buckeye env check` runs more
_LIMIT = 0.03
_MIN_SPREAD = 0.2
_MAX_TRUNCATED = 0.2
_GROUP = 8
_CONCURRENT = 128


def check_environments(context: PreflightContext) -> Iterator[Check]:
    """Run `buckeye env check` on a small sample of every environment whose tasks can be loaded."""
    if context.has_failed("environments"):
        return
    for env in context.run.orchestrator.env:
        if not context.has_failed(task_check_name(env)):
            context.progress(f"checking {env.id}")
            yield _check_environment(context, env)


def _check_environment(context: PreflightContext, env: TrainEnvConfig) -> Check:
    name, command = f"environment {env.id}", check_command(env)
    options = CheckOptions(
        sample=_SAMPLE, limit=_LIMIT, variables=tuple(env.variables), progress=context.progress
    )
    try:
        report = asyncio.run(check_environment(env.id, env.args, options))
    except BuckeyeError as error:
        return failed_with(name, error)
    lines = [f"{check.status:>7}  {check.name}: {shortened(check.detail)}" for check in report.checks]
    wrong = [check for check in report.checks if check.status == "error"]
    unusable = next((check for check in wrong if check.name == TASK_TOOLS), None)
    if unusable is not None:
        return failed(name, f"{unusable.name}: {unusable.detail}", command, lines)
    if verdict(report.rollouts, report.errored) == "failed":
        return failed(name, f"{report.errored:,} of {report.rollouts:,} rollouts errored", command, lines)
    wrong += [check for check in report.checks if check.status == "warning"]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return warning(name, f"{wrong[0].name}: {shortened(wrong[0].detail)}{more}", command, lines)
    return ok(name, f"{counted(len(lines), 'check')} on a sample of {_SAMPLE}", lines)


def check_spread(context: PreflightContext) -> Iterable[Check]:
    """Run groups of every environment with the model, and check that rewards differ within groups."""
    if not context.sample:
        return [
            skipped(SPREAD, "pass --sample 8 to run 8 groups with the model and measure the reward spread")
        ]
    if any(check.state == "failed" and check.name != MEMORY for check in context.results):
        return [skipped(SPREAD, "other checks have failed; fix them first")]
    if context.model_path is None:
        return [skipped(SPREAD, "the model is not on this machine")]
    context.progress(f"running {counted(context.sample, 'group')} with {context.run.trainer.model.name}")
    try:
        results = asyncio.run(_run_groups(context.run, context.sample))
    except BuckeyeError as error:
        return [failed_with(SPREAD, error)]
    return map(spread_check, results)


CHECKS = (PreflightCheck(check_environments), PreflightCheck(check_spread))
"""Expensive checks that only `rl doctor` runs."""


async def _run_groups(config: RLConfig, groups: int) -> list[EvalResult]:
    """Run groups of the first `groups` train tasks of every environment with the model.

    Raise `UsageError` if the model does not exist, and `RunError` if its engine does not start.
    """
    orchestrator, timeout = config.orchestrator, config.orchestrator.rollout_timeout
    longest = min(orchestrator.sampling.max_tokens or orchestrator.seq_len, orchestrator.seq_len)
    sampling = ChatSampling(
        temperature=orchestrator.sampling.temperature, max_tokens=longest, seed=orchestrator.seed
    )
    engine = InferenceConfig(model=ServedModelConfig(max_model_len=orchestrator.seq_len))
    concurrent = orchestrator.max_concurrent or _CONCURRENT
    loaded = load_environments(orchestrator.env, rollout_timeout=timeout)
    async with model_server(
        config.trainer.model.name, None, "", timeout=timeout, max_concurrent=concurrent, engine=engine
    ) as server:
        runner = chat_rollout_runner(
            server, sampling, seed=orchestrator.seed, timeout=timeout, retries=1, max_concurrent=concurrent
        )
        return [
            await evaluate(
                env,
                runner,
                split=TRAIN,
                num_examples=groups,
                rollouts_per_example=size if size > 1 else _GROUP,
            )
            for env, size in zip(loaded, orchestrator.group_sizes, strict=True)
        ]


def comparable_groups(result: EvalResult) -> list[list[float]]:
    """Return the rewards of each group that has at least two rewards."""
    size = result.rollouts_per_example
    groups = [result.all_rollouts[start : start + size] for start in range(0, len(result.all_rollouts), size)]
    rewards = [[r.reward for r in group if r.reward is not None] for group in groups]
    return [group for group in rewards if len(group) > 1]


def spread_check(result: EvalResult) -> Check:
    """Check the groups of one environment. A group with equal rewards has no training signal."""
    name = f"{SPREAD} in {result.env_name}"
    groups = comparable_groups(result)
    if not groups:
        error = result.errors[0].outcome.error if result.errors else "no tasks"
        return failed(
            name, f"no group has two rewards; {counted(result.errored, 'rollout')} errored: {error}", ""
        )
    mean, size = statistics.fmean(result.rewards), result.rollouts_per_example
    zero = sum(len(set(group)) == 1 for group in groups)
    truncated = statistics.fmean(rollout.truncated for rollout in result.rollouts)
    seen = (
        f"{zero} of {len(groups)} groups of {size} have no spread ({zero / len(groups):.0%}), "
        f"mean reward {mean:.3f}, {truncated:.0%} truncated"
    )
    if result.errored:
        seen += f", {counted(result.errored, 'rollout')} errored"
    if verdict(len(result.all_rollouts), result.errored) == "failed":
        return failed(name, seen, f"run: buckeye env check {result.env_name}")
    if zero == len(groups):
        return warning(name, seen, _no_spread_advice(result, truncated))
    if truncated > _MAX_TRUNCATED:
        return warning(name, seen, f"many replies are truncated: {advice_of('truncated')}")
    if 1 - zero / len(groups) < _MIN_SPREAD:
        return warning(name, seen, _spread_advice(mean, max(result.rewards)))
    return ok(name, seen)


def _no_spread_advice(result: EvalResult, truncated: float) -> str:
    tasks = [[r.reward for r in rollouts if r.reward is not None] for rollouts in result.by_task.values()]
    name = explain_no_spread(
        mean=result.mean_reward,
        std=statistics.pstdev(result.rewards),
        solved=statistics.fmean(is_pass(min(rewards)) for rewards in tasks),
        unsolved=statistics.fmean(max(rewards) <= 0.0 for rewards in tasks),
        truncated=truncated,
        alike=0.0,  # an untrained policy has not collapsed
        size=result.rollouts_per_example,
    )
    return f"{cause_of(name)}: {advice_of(name)}"


def _spread_advice(mean: float, best: float) -> str:
    if mean > best / 2 and best > 0:
        return f"the model solves nearly all tasks: {advice_of('all_solved')}"
    return f"the model solves nearly no task: {advice_of('none_solved')}"
