"""Advantages of a group of rollouts, and reward shaping."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from buckeye.base.columns import counted
from buckeye.base.distribution import CODE_FOLDER
from buckeye.base.user_function import load_user_function
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rewards import (
    AdvantageConfig,
    CustomAdvantageConfig,
    GroupAdvantageConfig,
    MaxRLAdvantageConfig,
    RewardShapingConfig,
    TurnAdvantageConfig,
)
from buckeye.config.shared import UserFunctionConfig
from buckeye.envs.base import Task
from buckeye.envs.stdlib_only.outcomes import (
    OutcomeError,
    frames_of,
    location_of,
    location_of_code,
    strip_addresses,
    to_finite_float,
)
from buckeye.errors import THIRD_PARTY_ERRORS, RunError, UsageError

_EPSILON = 1e-8
_NO_SPREAD = 1e-9
_SETTING = "orchestrator.advantage"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Input of reward shaping and advantages: a rollout that has a reward.

    `turn_rewards`, `turn_lengths` (sampled tokens) and `replies` (text) have one entry per turn.
    `components`, `stop_reason` and `task` come from the environment. `truncated` is True if the rollout was
    cut off at a length limit.
    """

    reward: float
    turn_rewards: Sequence[float]
    turn_lengths: Sequence[int]
    task: Task
    replies: Sequence[str]
    components: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = "done"
    truncated: bool = False


def group_advantages(
    rewards: Sequence[float],
    lengths: Sequence[int],
    settings: GroupAdvantageConfig | TurnAdvantageConfig,
) -> list[float]:
    """Return the advantage of each reward, before a division by the deviation of the batch.

    A_i = R_i - mean(R) (Shao et al. 2024, GRPO, eq. 4 without the deviation; the deviation favors easy
    and hard prompts, Liu et al. 2025, "Dr. GRPO"). `rewards` and `lengths` (sampled tokens) are aligned.
    Options:

    * `length_weighted_mean`: the baseline is sum(R_i * len_i) / sum(len_i)
    * `leave_one_out`: the baseline of i is the (weighted) mean of the others: A_i * G / (G - 1) (Kool et al.
      2019, RLOO), A_i * N / (N - len_i) with N = sum(len_i); 0 if the others have no weight
    * `std_norm = "local"`: divide by the group's population deviation
    * `neg_clipped`: negative advantages become 0

    Rewards without spread have advantages of exactly 0, independent of rounding in the mean.
    """
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    weights = lengths if settings.length_weighted_mean and sum(lengths) > 0 else [1] * len(rewards)
    total, baseline = sum(weights), statistics.fmean(rewards, weights)
    advantages = [r - baseline for r in rewards]
    if settings.leave_one_out:
        advantages = [
            a * total / (total - w) if w < total else 0.0 for a, w in zip(advantages, weights, strict=True)
        ]
    if settings.std_norm == "local":
        deviation = statistics.pstdev(rewards)
        advantages = [a / (deviation + _EPSILON) for a in advantages]
    if settings.neg_clipped:
        advantages = [max(a, 0.0) for a in advantages]
    return advantages


def max_rl_advantages(rewards: Sequence[float]) -> list[float]:
    """Return the MaxRL advantages (Tajwar et al. 2026, arXiv 2602.02710).

    A_i = (R_i - m) / m with m = mean(R); all 0 if m = 0.
    For rewards of 0 and 1, it is the gradient of an estimate of log p(solved) instead of p(solved). Raise
    `RunError` for a negative reward: the mean could then be arbitrarily close to 0.
    """
    if min(rewards) < 0:
        raise RunError(
            f"max_rl advantages need rewards of at least 0, and a rollout has {min(rewards):g}",
            code="BK-ENV-REWARD",
            hint='change the rewards of the environment, or set orchestrator.advantage.type = "group"',
        )
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [(r - mean) / mean for r in rewards]


def turn_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return the discounted return from each turn: G_k = r_k + discount * G_(k+1)."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(group: Sequence[Scored], settings: TurnAdvantageConfig) -> list[list[float]]:
    """Return the advantage of every turn of every rollout of a group.

    `group_advantages` compares the return of turn k with the returns at turn k of all rollouts that reached
    turn k. Zeng et al. 2025 (MT-GRPO, arXiv 2505.11821) also compare turns within a group, for two turns, and
    add the advantage of the outcome. Here the return of a turn contains the outcome. A turn that only one
    rollout reached has advantage 0.
    """
    returns = [turn_returns(rollout.turn_rewards, settings.discount) for rollout in group]
    advantages: list[list[float]] = [[] for _ in group]
    for turn in range(max(map(len, returns), default=0)):
        reached = [i for i, rollout_returns in enumerate(returns) if len(rollout_returns) > turn]
        compared = group_advantages(
            [returns[i][turn] for i in reached], [group[i].turn_lengths[turn] for i in reached], settings
        )
        for i, advantage in zip(reached, compared, strict=True):
            advantages[i].append(advantage)
    return advantages


def check_advantage(settings: AdvantageConfig | None) -> None:
    """Raise `UsageError` if the custom advantage function cannot be loaded. Call it before any rollout."""
    if isinstance(settings, CustomAdvantageConfig):
        load_user_function(settings.import_path, settings.kwargs, setting=_SETTING)


def custom_advantages(group: Sequence[Scored], settings: CustomAdvantageConfig) -> list[list[float]]:
    """Return the advantages from the user's `function(group, **kwargs)`, per rollout and turn.

    The function returns one number per rollout, or a list with one number per turn. Raise `UsageError` if it
    is missing, fails, or returns anything else.
    """
    function = load_user_function(settings.import_path, settings.kwargs, setting=_SETTING)
    try:
        values = list(function(group, **settings.kwargs))
        return [_turn_values(value, rollout) for value, rollout in zip(values, group, strict=True)]
    except THIRD_PARTY_ERRORS as error:  # third-party code, or a result of the wrong form
        raise UsageError(
            f"the advantage function failed for a group of task {group[0].task.id!r}: "
            f"{type(error).__name__}: {strip_addresses(str(error))}",
            code="BK-TRAINING",
            at=f"{_SETTING}.import_path = {settings.import_path!r}"
            f"{location_of_code(getattr(function, '__code__', None))}",
            hint=f"return {len(group)} entries, one per rollout: a number, or a list with a number per turn",
        ) from error


def _turn_values(value: float | Sequence[float], rollout: Scored) -> list[float]:
    turns = len(rollout.turn_rewards)
    values = [float(v) for v in value] if isinstance(value, Sequence) else [float(value)] * turns
    if len(values) != turns or not all(map(math.isfinite, values)):
        raise ValueError(f"{value!r} for a rollout of {counted(turns, 'turn')}")
    return values


def batch_advantages(
    groups: Sequence[Sequence[Scored]], settings: AdvantageConfig | None
) -> list[list[list[float]]]:
    """Return the advantage of every turn of every rollout of every group.

    With `settings = None` these are the raw rewards. `std_norm = "global"` divides by the population
    deviation of all rewards of the batch.
    """
    advantages = [_group_turn_advantages(group, settings) for group in groups]
    if isinstance(settings, (GroupAdvantageConfig, TurnAdvantageConfig)) and settings.std_norm == "global":
        deviation = statistics.pstdev([rollout.reward for group in groups for rollout in group]) + _EPSILON
        advantages = [[[a / deviation for a in turns] for turns in group] for group in advantages]
    return advantages


def _group_turn_advantages(group: Sequence[Scored], settings: AdvantageConfig | None) -> list[list[float]]:
    if isinstance(settings, TurnAdvantageConfig):
        return turn_advantages(group, settings)
    if isinstance(settings, CustomAdvantageConfig):
        return custom_advantages(group, settings)
    rewards = [rollout.reward for rollout in group]
    if settings is None:
        advantages = rewards
    elif isinstance(settings, MaxRLAdvantageConfig):
        advantages = max_rl_advantages(rewards)
    else:
        advantages = group_advantages(rewards, [sum(rollout.turn_lengths) for rollout in group], settings)
    return [[a] * len(rollout.turn_rewards) for a, rollout in zip(advantages, group, strict=True)]


def has_spread(values: Sequence[float]) -> bool:
    """Return True if the values differ. Rewards without spread have advantages of 0."""
    return max(values) - min(values) > _NO_SPREAD


def group_has_spread(group: Sequence[Scored], settings: AdvantageConfig | None) -> bool:
    """Return True if the group has a training signal: an advantage other than 0.

    Raise `RunError` or `UsageError` if the advantages cannot be computed.
    """
    return any(abs(a) > _NO_SPREAD for turns in _group_turn_advantages(group, settings) for a in turns)


# Reward shaping: amounts added to the rewards of training rollouts, by cause. The raw reward is kept.

TRUNCATED = "length"
"""Stop reason of a truncated rollout if its own reason is not listed."""
_FUNCTION = "orchestrator.reward_shaping.function"


class UserFunctionError(Exception):
    """Failure of the user's reward-shaping function for one rollout; the message gives the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardShaping:
    """Reward-shaping settings.

    `max_length` is the length with the full length penalty; None: no length penalties.
    """

    settings: RewardShapingConfig
    max_length: int | None

    def amounts(self, rollout: Scored) -> Mapping[str, float]:
        """Return the amount that each configured cause adds to the reward; 0.0 if the cause does not apply.

        `stop_reason` replaces the reward or subtracts from it. `overlong` is `overlong_amount`, scaled.
        `length` is -length_penalty * length / max_length, minus the part that `overlong` already covers.
        `function` is the result of the user's function. Raise `UserFunctionError` if that function fails, and
        `UsageError` if it is missing.
        """
        settings, amounts = self.settings, {}
        reward = rollout.reward
        longest_reply = max(rollout.turn_lengths, default=0)
        length = longest_reply if settings.length_of == "reply" else sum(rollout.turn_lengths)
        by_reason = {
            **{reason: value - reward for reason, value in settings.stop_reason_rewards.items()},
            **{reason: -penalty for reason, penalty in settings.stop_reason_penalties.items()},
        }
        if by_reason:
            reason = rollout.stop_reason
            if rollout.truncated and reason not in by_reason:
                reason = TRUNCATED
            amounts["stop_reason"] = by_reason.get(reason, 0.0)
        if self.max_length is not None and settings.overlong_cache is not None:
            amounts["overlong"] = settings.overlong_penalty * overlong_amount(
                length, self.max_length, settings.overlong_cache
            )
        if self.max_length is not None and settings.length_penalty:
            whole = -settings.length_penalty * length / self.max_length
            amounts["length"] = min(0.0, whole - amounts.get("overlong", 0.0))
        if settings.function is not None:
            amounts["function"] = _user_amount(rollout, settings.function)
        return amounts


def _load_shaping_function(config: UserFunctionConfig) -> Callable[..., Any]:
    return load_user_function(config.import_path, config.kwargs, setting=_FUNCTION)


def _user_amount(rollout: Scored, config: UserFunctionConfig) -> float:
    function = _load_shaping_function(config)
    try:
        return to_finite_float(function(rollout, **config.kwargs), "the amount")
    except OutcomeError as error:
        location = location_of_code(getattr(function, "__code__", None))
        raise UserFunctionError(f"{_FUNCTION}: {error}{location}") from None
    except THIRD_PARTY_ERRORS as error:  # third-party code
        location = location_of(frames_of(error, CODE_FOLDER))
        reason = strip_addresses(f"{type(error).__name__}: {error}")
        raise UserFunctionError(f"{_FUNCTION}: {reason}{location}") from error


def overlong_amount(length: int, max_length: int, cache: int) -> float:
    """Return the soft overlong punishment, from 0 to -1 (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_length - cache, then ((max_length - cache) - length) / cache, and -1 beyond max_length.
    """
    return -min(1.0, max(0.0, (length - (max_length - cache)) / cache))


def reward_shaping(config: OrchestratorConfig) -> RewardShaping | None:
    """Return the configured reward shaping, including `zero_truncated_completions`; None if not configured.

    Raise `UsageError` if a configured function is missing.
    """
    settings = config.reward_shaping
    if config.zero_truncated_completions:
        settings = settings or RewardShapingConfig()
        settings = settings.model_copy(update={"stop_reason_rewards": {TRUNCATED: 0.0}})
    if settings is None:
        return None
    if settings.function is not None:
        _load_shaping_function(settings.function)
    return RewardShaping(settings=settings, max_length=settings.max_length or config.sampling.max_tokens)
