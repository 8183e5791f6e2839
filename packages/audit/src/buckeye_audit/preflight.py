"""Whether the environments load, pass their checks, and give rewards from which the model can learn."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable

from buckeye.config.environments import EvalsConfig, MeasuredEnvConfig, TrainEnvConfig
from buckeye.config.rl import RLConfig
from buckeye.config.shared import EvalSamplingConfig, PolicyModelConfig
from buckeye.envs.base import TRAIN
from buckeye.errors import BuckeyeError
from buckeye.monitor.signals import verdict
from buckeye.orchestrator.evaluation import EvalResult
from buckeye.sizing.check import Check, failed, ok, skipped, warning
from buckeye.sizing.model import find_model
from buckeye_audit.check import CheckOptions, check_environment
from buckeye_audit.checks.result import shortened
from buckeye_audit.diagnosis.learning import EASIER_TASKS, HARDER_TASKS, MORE_TOKENS, reason_without_spread
from buckeye_audit.evals import evaluate_model
from buckeye_audit.group_spread import spread_of

SPREAD = "group spread"
_SAMPLE = 20  # tasks of each family and split: `buckeye env check` looks at more
_LIMIT = 0.03
_LITTLE = 0.2
_MUCH_CUT = 0.2
_GROUP = 8


def check_played(env: TrainEnvConfig, progress: Callable[[str], None]) -> Check:
    """Play an environment that has tasks, as `buckeye env check` does."""
    name, again = f"environment {env.id}", f"buckeye env check {env.id}"
    progress(f"checking {env.id}")
    options = CheckOptions(sample=_SAMPLE, limit=_LIMIT, variables=tuple(env.variables), progress=progress)
    try:
        report = asyncio.run(check_environment(env.id, env.args, options))
    except BuckeyeError as error:
        return failed(name, str(error), "")
    lines = [f"{check.status:>7}  {check.name}: {shortened(check.detail)}" for check in report.checks]
    if verdict(report.rollouts, report.errored) == "failed":
        return failed(name, f"{report.errored:,} of {report.rollouts:,} rollouts errored", again, lines)
    wrong = [check for check in report.checks if check.status == "error"]
    wrong += [check for check in report.checks if check.status == "warning"]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return warning(name, f"{wrong[0].name}: {shortened(wrong[0].detail)}{more}", again, lines)
    return ok(name, f"{len(lines)} checks on a sample of {_SAMPLE}", lines)


def check_spread(config: RLConfig, groups: int) -> list[Check]:
    """Play groups of every environment with the model itself, as training would. Takes as long as sampling
    does."""
    if find_model(config.trainer.model.name) is None:
        return [skipped(SPREAD, "the model is not on this machine")]
    try:
        results = asyncio.run(evaluate_model(_sample(config, groups)))
    except BuckeyeError as error:
        return [failed(SPREAD, str(error), "")]
    return [spread_check(result) for result in results]


def _sample(config: RLConfig, groups: int) -> EvalsConfig:
    orchestrator = config.orchestrator
    sampling = orchestrator.sampling
    return EvalsConfig(
        env=[
            MeasuredEnvConfig(
                **env.model_dump(exclude={"ratio", "rollouts_per_example"}),
                split=TRAIN,
                num_examples=groups,
                rollouts_per_example=size if size > 1 else _GROUP,
            )
            for env, size in zip(orchestrator.env, orchestrator.group_sizes, strict=True)
        ],
        model=PolicyModelConfig(name=config.trainer.model.name),
        sampling=EvalSamplingConfig(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
        ),
        seq_len=orchestrator.seq_len,
        max_concurrent=orchestrator.max_concurrent,
        rollout_timeout=orchestrator.rollout_timeout,
        seed=orchestrator.seed,
    )


def spread_check(result: EvalResult) -> Check:
    """What the rewards of the groups say: where all of a group are equal, it teaches nothing."""
    name = f"{SPREAD} in {result.env_name}"
    spread = spread_of(result)
    if not spread.scored:
        first = result.errors[0].outcome.error if result.errors else "there are no tasks"
        return failed(name, f"no group has two scored rollouts; {spread.errored} errored: {first}", "")
    rewards = [rollout.reward for rollout in result.rollouts if rollout.reward is not None]
    mean, zero = statistics.fmean(rewards), spread.scored - spread.spread
    seen = (
        f"{zero} of {spread.scored} groups of {spread.size} have no spread ({zero / spread.scored:.0%}), "
        f"mean reward {mean:.3f}, {spread.truncated:.0%} truncated"
    )
    if spread.errored:
        seen += f", {spread.errored} rollouts errored"
    if verdict(len(result.played), spread.errored) == "failed":
        return failed(name, seen, f"see why: buckeye env check {result.env_name}")
    if not spread.spread:
        return warning(name, seen, _why_no_spread(result, spread.size))
    if spread.truncated > _MUCH_CUT:
        return warning(name, seen, f"many replies are cut off: {MORE_TOKENS}")
    if spread.spread / spread.scored < _LITTLE:
        return warning(name, seen, _what_to_do(mean, max(rewards)))
    return ok(name, seen)


def _why_no_spread(result: EvalResult, size: int) -> str:
    tasks = [[r.reward for r in rollouts if r.reward is not None] for rollouts in result.by_task.values()]
    reason = reason_without_spread(
        mean=result.mean_reward,
        std=statistics.pstdev(result.rewards),
        solved=statistics.fmean(min(rewards) >= 1.0 for rewards in tasks),
        unsolved=statistics.fmean(max(rewards) <= 0.0 for rewards in tasks),
        truncated=statistics.fmean(rollout.truncated for rollout in result.rollouts),
        alike=0.0,  # what nobody has trained yet has not collapsed
        size=size,
    )
    return f"{reason.cause}: {reason.advice}"


def _what_to_do(mean: float, best: float) -> str:
    if mean > best / 2 and best > 0:
        return f"the model can do nearly all of it: {HARDER_TASKS}"
    return f"nearly all fail alike: {EASIER_TASKS}"
