"""Reward shaping: what is added to the rewards of training rollouts, by cause. The raw reward is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from buckeye.config.base import OwnFunctionConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rewards import RewardShapingConfig
from buckeye.orchestrator.advantages import Scored
from buckeye.own_function import load_own_function

TRUNCATED = "length"
"""The stop reason of every rollout that was cut off, unless the environment's own is listed."""
_FUNCTION = "orchestrator.reward_shaping.function"


class OwnFunctionError(Exception):
    """What the user's function said of a rollout cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardShaping:
    """The settings, and `max_length`, the length at which length penalties are full; None if there are
    none."""

    settings: RewardShapingConfig
    max_length: int | None

    def amounts(self, rollout: Scored) -> Mapping[str, float]:
        """What each cause that is set adds to the reward of a rollout; 0.0 where it does not apply.

        `stop_reason` replaces the reward or subtracts from it; `overlong` is `overlong_amount`; `length` is
        -length_penalty * length / max_length, or what of that is more than `overlong`; `function` is what the
        user's own says. Raises `OwnFunctionError` if that fails, and `UsageError` if it is not there.
        """
        settings, amounts = self.settings, {}
        reward = rollout.reward
        of_reply = settings.length_of == "reply"
        length = max(rollout.turn_lengths, default=0) if of_reply else sum(rollout.turn_lengths)
        by_reason = {
            **{reason: value - reward for reason, value in settings.stop_reason_rewards.items()},
            **{reason: -penalty for reason, penalty in settings.stop_reason_penalties.items()},
        }
        if by_reason:
            given = rollout.stop_reason
            reason = given if given in by_reason or not rollout.truncated else TRUNCATED
            amounts["stop_reason"] = by_reason.get(reason, 0.0)
        if self.max_length is not None and settings.overlong_cache is not None:
            amounts["overlong"] = settings.overlong_penalty * overlong_amount(
                length, self.max_length, settings.overlong_cache
            )
        if self.max_length is not None and settings.length_penalty:
            whole = -settings.length_penalty * length / self.max_length
            amounts["length"] = min(0.0, whole - amounts.get("overlong", 0.0))
        if settings.function is not None:
            amounts["function"] = _own_amount(rollout, settings.function)
        return amounts


def _own_function(config: OwnFunctionConfig) -> Callable[..., Any]:
    return load_own_function(config.import_path, config.kwargs, setting=_FUNCTION)


def _own_amount(rollout: Scored, config: OwnFunctionConfig) -> float:
    function = _own_function(config)
    try:
        amount = float(function(rollout, **config.kwargs))
    except Exception as error:  # not our code
        raise OwnFunctionError(f"{_FUNCTION}: {type(error).__name__}: {error}") from error
    if not math.isfinite(amount):
        raise OwnFunctionError(f"{_FUNCTION} said {amount}")
    return amount


def overlong_amount(length: int, max_length: int, cache: int) -> float:
    """The soft overlong punishment (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13), from 0 to -1.

    0 up to max_length - cache, then ((max_length - cache) - length) / cache, and -1 beyond max_length.
    """
    return -min(1.0, max(0.0, (length - (max_length - cache)) / cache))


def reward_shaping(config: OrchestratorConfig) -> RewardShaping | None:
    """The shaping that the settings ask for, if any; `zero_truncated_completions` is part of it. Raises
    `UsageError` if a function that they name is not there."""
    settings = config.reward_shaping
    if config.zero_truncated_completions:
        settings = settings or RewardShapingConfig()
        settings = settings.model_copy(update={"stop_reason_rewards": {TRUNCATED: 0.0}})
    if settings is None:
        return None
    if settings.function is not None:
        _own_function(settings.function)
    return RewardShaping(settings=settings, max_length=settings.max_length or config.sampling.max_tokens)
