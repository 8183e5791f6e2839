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
    ComponentAdvantageConfig,
    CustomAdvantageConfig,
    GroupAdvantageConfig,
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
from buckeye.errors import THIRD_PARTY_ERRORS, UsageError

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


def shaped_turn_rewards(
    given: Sequence[float] | None, turns: int, reward: float, shaping: float
) -> list[float]:
    """Return the reward of each turn, from those that the environment gave, if it gave any.

    The last turn gets the amounts of reward shaping. Without given turn rewards, it also gets the whole
    reward.
    """
    if not turns:
        return []
    rewards = [0.0] * (turns - 1) + [reward] if given is None else list(given)
    # turns without a reply, because the context was full, may have rewards: add them to the last turn
    return [*rewards[: turns - 1], sum(rewards[turns - 1 :]) + shaping]


def group_advantages(
    rewards: Sequence[float], settings: GroupAdvantageConfig | TurnAdvantageConfig
) -> list[float]:
    """Return the advantages of a group's rewards.

    With `std_norm = "global"`, these advantages are not yet divided by the standard deviation of the batch.

    A_i = R_i - mean(R). This is GRPO (Shao et al. 2024, eq. 4) without the division by the standard
    deviation, which favors easy and hard prompts (Liu et al. 2025, "Dr. GRPO"). Options:

    * `leave_one_out`: the baseline of rollout i is the mean of the other rewards, which multiplies A_i by
      G / (G - 1) (Kool et al. 2019, RLOO)
    * `std_norm = "local"`: divide by the population standard deviation of the group

    If all rewards of the group are equal, all advantages are exactly 0, without a rounding error of the mean.
    """
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    baseline = statistics.fmean(rewards)
    advantages = [r - baseline for r in rewards]
    if settings.leave_one_out:
        advantages = [a * len(rewards) / (len(rewards) - 1) for a in advantages]
    if settings.std_norm == "local":
        deviation = statistics.pstdev(rewards)
        advantages = [a / (deviation + _EPSILON) for a in advantages]
    return advantages


def turn_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return the discounted return of each turn: G_k = r_k + discount * G_(k+1)."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(group: Sequence[Scored], settings: TurnAdvantageConfig) -> list[list[float]]:
    """Return the advantages of a group: a list per rollout, with one advantage per turn.

    The advantage of turn k compares its return with the returns of turn k in all rollouts of the group that
    reached turn k. If only one rollout reached turn k, the advantage is 0. MT-GRPO (Zeng et al. 2025, arXiv
    2505.11821) compares turns in a similar way, but adds the advantage of the outcome separately. Here the
    return of each turn includes the outcome.
    """
    returns = [turn_returns(rollout.turn_rewards, settings.discount) for rollout in group]
    advantages: list[list[float]] = [[] for _ in group]
    for turn in range(max(map(len, returns), default=0)):
        reached = [i for i, rollout_returns in enumerate(returns) if len(rollout_returns) > turn]
        compared = group_advantages([returns[i][turn] for i in reached], settings)
        for i, advantage in zip(reached, compared, strict=True):
            advantages[i].append(advantage)
    return advantages


def component_advantages(group: Sequence[Scored], settings: ComponentAdvantageConfig) -> list[float]:
    """Return the advantages of a group, not yet divided by their standard deviation in the batch.

    A_i = sum over the components k of w_k (r_ik - mean(r_k)) / (std(r_k) + 1e-8), with mean and population
    standard deviation over the group. A component that is equal in the whole group adds exactly 0.

    Source: GDPO, group reward-decoupled normalization (Liu et al. 2026, arXiv 2601.05242). A sum of rewards
    that is normalized afterwards can give different combinations of rewards the same advantage. GDPO then
    normalizes A over the batch; its mean is already 0.

    Raise `UsageError` if a rollout lacks a component.
    """
    local = GroupAdvantageConfig(std_norm="local")
    for rollout in group:
        if missing := settings.weights.keys() - rollout.components.keys():
            raise UsageError(
                f"a rollout of task {rollout.task.id!r} has no reward component "
                f"{', '.join(map(repr, sorted(missing)))}; it has {sorted(rollout.components)}",
                code="BK-TRAINING",
                at=f"{_SETTING}.weights",
                hint="name components that every rollout has, see `buckeye rl rollouts RUN --json`",
            )
    weighted = [
        [weight * a for a in group_advantages([rollout.components[name] for rollout in group], local)]
        for name, weight in settings.weights.items()
    ]
    return [math.fsum(values) for values in zip(*weighted, strict=True)]


def check_advantage(settings: AdvantageConfig | None) -> None:
    """Raise `UsageError` if the custom advantage function cannot be loaded. Call it before any rollout."""
    if isinstance(settings, CustomAdvantageConfig):
        load_user_function(settings.import_path, settings.kwargs, setting=_SETTING)


def custom_advantages(group: Sequence[Scored], settings: CustomAdvantageConfig) -> list[list[float]]:
    """Return the advantages from the user's `function(group, **kwargs)`, per rollout and turn.

    For each rollout, the function returns a number, or a list with a number per turn. Raise `UsageError` if
    the function is missing, fails, or returns anything else.
    """
    function = load_user_function(settings.import_path, settings.kwargs, setting=_SETTING)
    try:
        values = list(function(group, **settings.kwargs))
        return [_turn_values(value, rollout) for value, rollout in zip(values, group, strict=True)]
    except THIRD_PARTY_ERRORS as error:  # also for a result of the wrong form
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

    With `settings = None`, the advantages are the rewards. `std_norm = "global"` divides by the population
    standard deviation of all rewards of the batch. `type = "components"` divides by that of the advantages.
    """
    advantages = [_group_turn_advantages(group, settings) for group in groups]
    if isinstance(settings, (GroupAdvantageConfig, TurnAdvantageConfig)) and settings.std_norm == "global":
        deviation = statistics.pstdev([rollout.reward for group in groups for rollout in group]) + _EPSILON
        advantages = [[[a / deviation for a in turns] for turns in group] for group in advantages]
    if isinstance(settings, ComponentAdvantageConfig):
        sums = [component_advantages(group, settings) for group in groups]
        deviation = statistics.pstdev([a for group in sums for a in group]) + _EPSILON
        advantages = [[[a / deviation for a in turns] for turns in group] for group in advantages]
    return advantages


def _group_turn_advantages(group: Sequence[Scored], settings: AdvantageConfig | None) -> list[list[float]]:
    if isinstance(settings, TurnAdvantageConfig):
        return turn_advantages(group, settings)
    if isinstance(settings, CustomAdvantageConfig):
        return custom_advantages(group, settings)
    rewards = [rollout.reward for rollout in group]
    if isinstance(settings, ComponentAdvantageConfig):
        advantages: Sequence[float] = component_advantages(group, settings)
    else:
        advantages = rewards if settings is None else group_advantages(rewards, settings)
    return [[a] * len(rollout.turn_rewards) for a, rollout in zip(advantages, group, strict=True)]


def has_spread(values: Sequence[float]) -> bool:
    """Return True if the rewards differ. Equal rewards have advantages of 0."""
    return max(values) - min(values) > _NO_SPREAD


def group_has_spread(group: Sequence[Scored], settings: AdvantageConfig | None) -> bool:
    """Return True if the group has a training signal: an advantage other than 0.

    Raise `UsageError` if the advantages cannot be computed.
    """
    return any(abs(a) > _NO_SPREAD for turns in _group_turn_advantages(group, settings) for a in turns)


# Reward shaping adds amounts, by cause, to the rewards of training rollouts. Logs keep the raw reward too.

TRUNCATED = "length"
"""Key of `stop_reason_rewards` for truncated rollouts whose stop reason is not one of the keys."""
_FUNCTION = "orchestrator.reward_shaping.function"


class UserFunctionError(Exception):
    """The user's reward-shaping function failed for one rollout. The message has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardShaping:
    """Reward-shaping settings.

    Rollouts with more sampled tokens than `max_length` get the full overlong penalty. None: no overlong
    penalty.
    """

    settings: RewardShapingConfig
    max_length: int | None

    def amounts(self, rollout: Scored) -> Mapping[str, float]:
        """Return the amount to add to the reward for each configured cause; 0.0 if the cause does not apply.

        The amount of `stop_reason` is the configured reward of the stop reason, minus the rollout's reward.
        If the stop reason has no configured reward, this amount is 0. The amount of `overlong` is
        `overlong_amount` times `overlong_penalty`. The amount of `function` is the result of the user's
        function. Raise `UserFunctionError` if this function fails, and `UsageError` if it is missing.
        """
        settings, amounts = self.settings, {}
        if settings.stop_reason_rewards:
            reason = rollout.stop_reason
            if rollout.truncated and reason not in settings.stop_reason_rewards:
                reason = TRUNCATED
            amounts["stop_reason"] = settings.stop_reason_rewards.get(reason, rollout.reward) - rollout.reward
        if self.max_length is not None and settings.overlong_cache is not None:
            amounts["overlong"] = settings.overlong_penalty * overlong_amount(
                sum(rollout.turn_lengths), self.max_length, settings.overlong_cache
            )
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
    except THIRD_PARTY_ERRORS as error:
        location = location_of(frames_of(error, CODE_FOLDER))
        reason = strip_addresses(f"{type(error).__name__}: {error}")
        raise UserFunctionError(f"{_FUNCTION}: {reason}{location}") from error


def overlong_amount(length: int, max_length: int, cache: int) -> float:
    """Return the soft overlong punishment, from 0 to -1 (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13).

    The amount is 0 up to a length of max_length - cache, and -1 from max_length. It is linear in between.
    """
    return -min(1.0, max(0.0, (length - (max_length - cache)) / cache))


def reward_shaping(config: OrchestratorConfig) -> RewardShaping | None:
    """Return the reward shaping of the configuration, or None.

    Raise `UsageError` if a configured function is missing.
    """
    settings = config.reward_shaping
    if settings is None:
        return None
    if settings.function is not None:
        _load_shaping_function(settings.function)
    return RewardShaping(settings=settings, max_length=settings.max_length or config.sampling.max_tokens)
