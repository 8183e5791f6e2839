"""Reward shaping: what is added to the rewards of training rollouts, by cause. The raw reward is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rewards import RewardShapingConfig

TRUNCATED = "length"
"""The stop reason of every rollout that was cut off, unless the environment's own is listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardShaping:
    """The settings, and `max_length`, the length at which length penalties are full; None if there are
    none."""

    settings: RewardShapingConfig
    max_length: int | None

    def amounts(
        self, reward: float, *, stop_reason: str, truncated: bool, completion_tokens: int
    ) -> Mapping[str, float]:
        """What each cause that is set adds to the reward of a rollout; 0.0 where it does not apply.

        `stop_reason` replaces the reward or subtracts from it; `overlong` is `overlong_amount`; `length` is
        -length_penalty * completion_tokens / max_length.
        """
        settings, amounts = self.settings, {}
        by_reason = {
            **{reason: value - reward for reason, value in settings.stop_reason_rewards.items()},
            **{reason: -penalty for reason, penalty in settings.stop_reason_penalties.items()},
        }
        if by_reason:
            reason = stop_reason if stop_reason in by_reason or not truncated else TRUNCATED
            amounts["stop_reason"] = by_reason.get(reason, 0.0)
        if self.max_length is not None and settings.overlong_cache is not None:
            amounts["overlong"] = settings.overlong_penalty * overlong_amount(
                completion_tokens, self.max_length, settings.overlong_cache
            )
        if self.max_length is not None and settings.length_penalty:
            amounts["length"] = -settings.length_penalty * completion_tokens / self.max_length
        return amounts


def overlong_amount(length: int, max_length: int, cache: int) -> float:
    """The soft overlong punishment (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13), from 0 to -1.

    0 up to max_length - cache, then ((max_length - cache) - length) / cache, and -1 beyond max_length.
    """
    return -min(1.0, max(0.0, (length - (max_length - cache)) / cache))


def reward_shaping(config: OrchestratorConfig) -> RewardShaping | None:
    """The shaping that the settings ask for, if any; `zero_truncated_completions` is part of it."""
    settings = config.reward_shaping
    if config.zero_truncated_completions:
        settings = settings or RewardShapingConfig()
        settings = settings.model_copy(update={"stop_reason_rewards": {TRUNCATED: 0.0}})
    if settings is None:
        return None
    return RewardShaping(settings=settings, max_length=settings.max_length or config.sampling.max_tokens)
