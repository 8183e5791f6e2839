"""Advantages of a group of rollouts: how much better each did than its siblings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from buckeye.config.rewards import (
    AdvantageConfig,
    GroupAdvantageConfig,
    MaxRLAdvantageConfig,
    TurnAdvantageConfig,
)
from buckeye.errors import RunError

_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What advantages are made of: the reward of a rollout and, for each of its turns, what it was paid and
    how many tokens were sampled in it."""

    reward: float
    turn_rewards: Sequence[float]
    turn_lengths: Sequence[int]


def group_advantages(
    rewards: Sequence[float],
    lengths: Sequence[int],
    settings: GroupAdvantageConfig | TurnAdvantageConfig,
) -> list[float]:
    """The advantage of each of the compared rewards, before any division by a batch-wide deviation.

    A_i = R_i - mean(R) (Shao et al. 2024, GRPO, eq. 4 without the deviation; the deviation favours easy
    and hard prompts, Liu et al. 2025, "Dr. GRPO"). `rewards` and `lengths` (sampled tokens) are aligned.
    Options:

    * `length_weighted_mean`: the baseline is sum(R_i * len_i) / sum(len_i)
    * `leave_one_out`: the baseline of i is the (weighted) mean of the others: A_i * G / (G - 1) (Kool et al.
      2019, RLOO), A_i * N / (N - len_i) with N = sum(len_i); 0 if the others have no weight
    * `std_norm = "local"`: divided by the group's population deviation
    * `neg_clipped`: negative advantages become 0

    Rewards without spread have advantages of exactly 0, whatever the mean is rounded to.
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
    """A_i = (R_i - m) / m with m = mean(R), all 0 if m = 0 (Tajwar et al. 2026, MaxRL, arXiv 2602.02710).

    For rewards of 0 and 1 this is the gradient of an estimate of log p(solved) instead of p(solved). Raises
    `RunError` for a reward below 0, with which the mean is no share and may be as small as you like.
    """
    if min(rewards) < 0:
        raise RunError(
            f"max_rl advantages are for rewards of 0 or more, and a rollout got {min(rewards):g}: change "
            'what the environment pays, or set orchestrator.advantage.type = "group"'
        )
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [(r - mean) / mean for r in rewards]


def turn_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """The return from each turn on: G_k = r_k + discount * G_(k+1)."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(group: Sequence[Scored], settings: TurnAdvantageConfig) -> list[list[float]]:
    """The advantage of every turn of every rollout of a group.

    Turn k's return is compared, as by `group_advantages`, with those of turn k of the rollouts that got that
    far. Zeng et al. 2025 (MT-GRPO, arXiv 2505.11821) compare turns of a group so, for two turns, and add the
    advantage of the outcome; here the outcome is in the return. A rollout that alone got as far as a turn has
    nothing to be compared with: its advantage there is 0.
    """
    returns = [turn_returns(rollout.turn_rewards, settings.discount) for rollout in group]
    advantages: list[list[float]] = [[] for _ in group]
    for turn in range(max(map(len, returns), default=0)):
        there = [i for i, of_rollout in enumerate(returns) if len(of_rollout) > turn]
        compared = group_advantages(
            [returns[i][turn] for i in there], [group[i].turn_lengths[turn] for i in there], settings
        )
        for i, advantage in zip(there, compared, strict=True):
            advantages[i].append(advantage)
    return advantages


def batch_advantages(
    groups: Sequence[Sequence[Scored]], settings: AdvantageConfig | None
) -> list[list[list[float]]]:
    """The advantage of every turn of every rollout of every group; `settings = None` gives the raw rewards.

    `std_norm = "global"` divides by the population deviation of all rewards of the batch.
    """
    advantages = [_by_turn(group, settings) for group in groups]
    if isinstance(settings, (GroupAdvantageConfig, TurnAdvantageConfig)) and settings.std_norm == "global":
        deviation = statistics.pstdev([rollout.reward for group in groups for rollout in group]) + _EPSILON
        advantages = [[[a / deviation for a in turns] for turns in group] for group in advantages]
    return advantages


def _by_turn(group: Sequence[Scored], settings: AdvantageConfig | None) -> list[list[float]]:
    if isinstance(settings, TurnAdvantageConfig):
        return turn_advantages(group, settings)
    rewards = [rollout.reward for rollout in group]
    if settings is None:
        advantages = rewards
    elif isinstance(settings, MaxRLAdvantageConfig):
        advantages = max_rl_advantages(rewards)
    else:
        advantages = group_advantages(rewards, [sum(rollout.turn_lengths) for rollout in group], settings)
    return [[a] * len(rollout.turn_rewards) for a, rollout in zip(advantages, group, strict=True)]


def has_spread(values: Sequence[float]) -> bool:
    """Whether rewards that are compared differ at all; without spread their advantages are all 0."""
    return max(values) - min(values) > 1e-9


def group_has_spread(group: Sequence[Scored], settings: AdvantageConfig | None) -> bool:
    """Whether a group can teach: what is compared within it differs, the rewards or, by turn, the returns of
    some turn. Raw rewards (`settings = None`) are compared with 0. Raises as `max_rl_advantages`."""
    if isinstance(settings, TurnAdvantageConfig):
        plain = TurnAdvantageConfig(discount=settings.discount)
        return any(abs(a) > 1e-9 for turns in turn_advantages(group, plain) for a in turns)
    rewards = [rollout.reward for rollout in group]
    if settings is None:
        return has_spread([0.0, *rewards])
    if isinstance(settings, MaxRLAdvantageConfig):
        return any(max_rl_advantages(rewards))
    return has_spread(rewards)
