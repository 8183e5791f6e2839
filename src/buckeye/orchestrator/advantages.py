"""Advantages of a group of rollouts: how much better each did than its siblings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from buckeye.config.orchestrator import AdvantageConfig

_EPSILON = 1e-8


def group_advantages(
    rewards: Sequence[float], lengths: Sequence[int], settings: AdvantageConfig | None
) -> list[float]:
    """The advantage of each rollout of one group, before any division by a batch-wide deviation.

    A_i = R_i - mean(R) (Shao et al. 2024, GRPO, eq. 4 without the deviation; the deviation favours easy
    and hard prompts, Liu et al. 2025, "Dr. GRPO"). `rewards` and `lengths` (completion tokens) are aligned.
    `settings = None` returns the raw rewards. Options:

    * `length_weighted_mean`: the baseline is sum(R_i * len_i) / sum(len_i)
    * `leave_one_out`: the baseline of i is the mean of the others: A_i * G / (G - 1) (Kool et al. 2019, RLOO)
    * `std_norm = "local"`: divided by the group's population deviation
    * `neg_clipped`: negative advantages become 0
    """
    if settings is None:
        return list(rewards)
    if settings.length_weighted_mean and sum(lengths) > 0:
        baseline = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
    else:
        baseline = statistics.fmean(rewards)
    advantages = [r - baseline for r in rewards]
    size = len(rewards)
    if settings.leave_one_out and size > 1:
        advantages = [a * size / (size - 1) for a in advantages]
    if settings.std_norm == "local":
        deviation = statistics.pstdev(rewards)
        advantages = [a / (deviation + _EPSILON) for a in advantages]
    if settings.neg_clipped:
        advantages = [max(a, 0.0) for a in advantages]
    return advantages


def batch_advantages(
    groups: Sequence[tuple[Sequence[float], Sequence[int]]], settings: AdvantageConfig | None
) -> list[list[float]]:
    """Advantages of all groups of a batch, each given as (rewards, lengths). `std_norm = "global"` divides by
    the population deviation of all rewards of the batch."""
    advantages = [group_advantages(rewards, lengths, settings) for rewards, lengths in groups]
    if settings is not None and settings.std_norm == "global":
        deviation = statistics.pstdev([r for rewards, _ in groups for r in rewards])
        advantages = [[a / (deviation + _EPSILON) for a in group] for group in advantages]
    return advantages


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ at all; without spread its advantages are all 0 and teach nothing."""
    return max(rewards) - min(rewards) > 1e-9
