"""Filters that drop groups of rollouts before training."""

from __future__ import annotations

import statistics
from typing import Literal

from buckeye.config.buffer import OnlineDifficultyBufferConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.orchestrator.advantages import group_has_spread
from buckeye.orchestrator.rollout import Group

Cause = Literal["too_easy", "too_hard", "no_spread"]


def min_scored_rollouts(size: int, minimum: int | None) -> int:
    """Return the number of scored rollouts that a group of `size` rollouts needs to be trained on.

    This is `minimum` if set, else half of `size` (rounded up), but at least two.
    """
    return min(size, max(2, (size + 1) // 2)) if minimum is None else minimum


def drop_cause(group: Group, config: OrchestratorConfig) -> Cause | None:
    """Return the reason to drop a scored group, or None to keep it.

    `too_easy`: the mean raw reward is above the buffer's `max_reward`. `too_hard`: it is below `min_reward`.
    `no_spread` (only with `zero_spread = "drop"`): all advantages of the shaped rewards are 0. This filter is
    dynamic sampling (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 11).
    """
    if isinstance(config.buffer, OnlineDifficultyBufferConfig):
        mean = statistics.fmean(group.rewards)
        if mean < config.buffer.min_reward:
            return "too_hard"
        if mean > config.buffer.max_reward:
            return "too_easy"
    if config.zero_spread == "keep":
        return None
    scored = [rollout.as_scored() for rollout in group.scored]
    return None if group_has_spread(scored, config.advantage) else "no_spread"
