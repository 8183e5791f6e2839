"""Whether a model can learn from an environment: do the rewards of its replies to one task differ?"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from buckeye.config.environments import EnvConfig, EvalsConfig, MeasuredEnvConfig
from buckeye.config.shared import EvalSamplingConfig, PolicyModelConfig
from buckeye.envs.base import TRAIN
from buckeye.orchestrator.evaluation import EvalResult
from buckeye_audit.checks.result import CheckResult
from buckeye_audit.evals import evaluate_model

GROUP_SIZE = 8
SPREAD = "spread within groups"


@dataclass(frozen=True, slots=True)
class Spread:
    """`groups` of `size` rollouts were played; in `scored` of them at least two rollouts have a reward, in
    `spread` of those the rewards differ. `truncated` is the share of the scored rollouts that ran out of
    tokens; nan if there are none."""

    groups: int
    size: int
    scored: int
    spread: int
    truncated: float
    errored: int


async def play_groups(env: EnvConfig, *, model: str, groups: int, max_tokens: int, seed: int) -> Spread:
    """Play the first `groups` train tasks `GROUP_SIZE` times each, with an engine of its own for `model`.

    Raises UsageError if there is no such model, and RunError if its engine does not start.
    """
    config = EvalsConfig(
        env=[
            MeasuredEnvConfig(
                **env.model_dump(exclude_unset=True),
                split=TRAIN,
                num_examples=groups,
                rollouts_per_example=GROUP_SIZE,
            )
        ],
        model=PolicyModelConfig(name=model),
        sampling=EvalSamplingConfig(max_tokens=max_tokens),
        seed=seed,
    )
    (result,) = await evaluate_model(config)
    return spread_of(result)


def spread_of(result: EvalResult) -> Spread:
    """Count the groups of an evaluation whose rewards differ."""
    size = result.rollouts_per_example
    groups = [result.played[start : start + size] for start in range(0, len(result.played), size)]
    rewards = [[r.reward for r in group if r.reward is not None] for group in groups]
    comparable = [group for group in rewards if len(group) > 1]
    scored = result.rollouts
    return Spread(
        groups=len(groups),
        size=size,
        scored=len(comparable),
        spread=sum(len(set(group)) > 1 for group in comparable),
        truncated=statistics.fmean(r.truncated for r in scored) if scored else float("nan"),
        errored=result.errored,
    )


def check_spread(spread: Spread, model: str) -> CheckResult:
    """Some group has rewards that differ. Where none has, no update can be made from them."""
    if not spread.scored:
        why = f"{model}: no group has two scored rollouts; {spread.errored} errored"
        return CheckResult(SPREAD, "error" if spread.errored else "not run", why)
    detail = (
        f"{model}: rewards differ in {spread.spread} of {spread.scored} groups of {spread.size} "
        f"({spread.spread / spread.scored:.0%}), {spread.truncated:.0%} truncated"
    )
    if spread.errored:
        detail += f", {spread.errored} rollouts errored"
    return CheckResult(SPREAD, "pass" if spread.spread else "warning", detail)


def spread_not_run() -> CheckResult:
    """Without a model there is nothing to play."""
    return CheckResult(SPREAD, "not run", "give a model: --model PATH_OR_NAME")
