"""Settings of reward shaping and advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, Tag, model_validator

from buckeye.config.shared import BaseConfig, UserFunctionConfig, conflict, variant


class _GroupComparison(BaseConfig):
    std_norm: Literal["local", "global"] | None = None
    """Divide by the standard deviation of the group (local) or of the batch (global)."""
    length_weighted_mean: bool = False
    """Weight the mean by the lengths of the replies."""
    leave_one_out: bool = False
    """Subtract the mean of the other rollouts instead of the group's."""
    neg_clipped: bool = False
    """Set negative advantages to 0."""


class GroupAdvantageConfig(_GroupComparison):
    """Reward minus its group's mean."""

    type: Literal["group"] = "group"
    """Computation of advantages."""


class TurnAdvantageConfig(_GroupComparison):
    """Return of each turn (its own and later rewards) minus the group's mean return of that turn."""

    type: Literal["turn"] = "turn"
    """Computation of advantages."""
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount factor of later rewards, per turn."""


class CustomAdvantageConfig(UserFunctionConfig):
    """User function that computes a group's advantages."""

    type: Literal["custom"] = "custom"
    """Computation of advantages."""


AdvantageConfig = Annotated[
    Annotated[GroupAdvantageConfig, Tag("group")]
    | Annotated[TurnAdvantageConfig, Tag("turn")]
    | Annotated[CustomAdvantageConfig, Tag("custom")],
    variant("group"),
]


class RewardShapingConfig(BaseConfig):
    """Changes to the rewards of training rollouts. Evaluations are not shaped."""

    overlong_cache: PositiveInt | None = None
    """Number of tokens before max_length over which the overlong penalty rises from 0. None: off."""
    overlong_penalty: PositiveFloat = 1.0
    """Overlong penalty at max_length."""
    max_length: PositiveInt | None = None
    """Length of a rollout in sampled tokens with the full penalty. None: sampling.max_tokens, which limits
    one reply."""
    function: UserFunctionConfig | None = None
    """User function that adds to the reward. It gets the task, the messages, the stop reason and the reward
    components."""

    @model_validator(mode="after")
    def _every_setting_is_used(self) -> RewardShapingConfig:
        for name in ("overlong_penalty", "max_length"):
            default = RewardShapingConfig.model_fields[name].default
            if self.overlong_cache is None and getattr(self, name) != default:
                raise conflict(
                    f"`{name}` has no effect without `overlong_cache`",
                    hint=f"set `overlong_cache`, or leave `{name}` out",
                )
        return self
