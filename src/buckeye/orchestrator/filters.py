"""Which groups of rollouts are not worth training on, and why."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Literal

from buckeye.config.buffer import OnlineDifficultyBufferConfig, SimpleBufferConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.orchestrator.advantages import group_has_spread
from buckeye.orchestrator.rollout import Group

Cause = Literal["too_easy", "too_hard", "no_spread"]

GroupFilter = Callable[[Group], Cause | None]
"""Why a scored group is not used; None if it is."""


def smallest_group(size: int, least: int | None) -> int:
    """How many rollouts with a reward a group of `size` needs: `least`, by default half of it, rounded up,
    but no fewer than two."""
    return min(size, max(2, (size + 1) // 2)) if least is None else least


def group_filter(config: OrchestratorConfig) -> GroupFilter:
    """The filters that the settings ask for.

    `too_easy` and `too_hard` are about the mean of the raw rewards: outside the buffer's `min_reward` and
    `max_reward`, or, with online_difficulty_filtering, a mean of 1 or of 0. `no_spread` is about what
    advantages are made of, the shaped rewards (dynamic sampling, Yu et al. 2025, DAPO, arXiv 2503.14476,
    eq. 11): they are all equal or, where they are used as they are (`advantage = None`), all 0.
    """

    def cause(group: Group) -> Cause | None:
        difficulty = _difficulty(statistics.fmean(group.rewards), config)
        if difficulty is not None:
            return difficulty
        if config.zero_spread == "drop" and not group_has_spread(
            [r.as_scored() for r in group.scored], config.advantage
        ):
            return "no_spread"
        return None

    return cause


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
