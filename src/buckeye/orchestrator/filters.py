"""Filters that drop groups of rollouts before training."""

from __future__ import annotations

import statistics
from typing import Literal

from buckeye.config.buffer import OnlineDifficultyBufferConfig, SimpleBufferConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.orchestrator.advantages import group_has_spread
from buckeye.orchestrator.rollout import Group

Cause = Literal["too_easy", "too_hard", "no_spread"]


def min_scored_rollouts(size: int, minimum: int | None) -> int:
    """Return the minimum number of scored rollouts of a group of `size`.

    The default of `minimum` is half of `size` (rounded up), but at least two.
    """
    return min(size, max(2, (size + 1) // 2)) if minimum is None else minimum


def drop_cause(group: Group, config: OrchestratorConfig) -> Cause | None:
    """Return the reason to drop a scored group, or None to keep it.

    `too_easy`, `too_hard`: the mean raw reward is above `max_reward` or below `min_reward` of the buffer; or,
    with online_difficulty_filtering, at least 1 or at most 0. `no_spread` (only with `zero_spread = "drop"`):
    the shaped rewards give no advantage; see `group_has_spread`. This is dynamic sampling (Yu et al. 2025,
    DAPO, arXiv 2503.14476, eq. 11).
    """
    difficulty = _difficulty(statistics.fmean(group.rewards), config)
    if difficulty is not None or config.zero_spread == "keep":
        return difficulty
    scored = [rollout.as_scored() for rollout in group.scored]
    return None if group_has_spread(scored, config.advantage) else "no_spread"


def _difficulty(mean: float, config: OrchestratorConfig) -> Cause | None:
    match config.buffer:
        case OnlineDifficultyBufferConfig(min_reward=low, max_reward=high):
            hard, easy = mean < low, mean > high
        case SimpleBufferConfig(online_difficulty_filtering=True):
            hard, easy = mean <= 0.0, mean >= 1.0
        case _:
            return None
    if hard:
        return "too_hard"
    return "too_easy" if easy else None
