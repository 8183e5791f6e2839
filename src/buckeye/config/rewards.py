"""Settings of reward shaping and advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, Tag, model_validator

from buckeye.config.shared import BaseConfig, UserFunctionConfig, conflict, variant


class _GroupComparison(BaseConfig):
    std_norm: Literal["local", "global"] | None = None
    """Divide by the deviation of the group (local) or of the batch (global)."""
    length_weighted_mean: bool = False
    """Weigh the mean by the lengths of the replies."""
    leave_one_out: bool = False
    """The mean of the others instead."""
    neg_clipped: bool = False
    """Negative advantages become 0."""


class GroupAdvantageConfig(_GroupComparison):
    """Reward minus its group's mean."""

    type: Literal["group"] = "group"
    """How rewards become advantages."""


class MaxRLAdvantageConfig(BaseConfig):
    """Reward minus its group's mean, divided by that mean: rarely solved tasks get more weight."""

    type: Literal["max_rl"] = "max_rl"
    """How rewards become advantages."""


class TurnAdvantageConfig(_GroupComparison):
    """Return of each turn (its own and later rewards) minus the group's mean return of that turn."""

    type: Literal["turn"] = "turn"
    """How rewards become advantages."""
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How much less a reward counts for every turn that it comes later."""


class CustomAdvantageConfig(UserFunctionConfig):
    """User function that computes a group's advantages."""

    type: Literal["custom"] = "custom"
    """How rewards become advantages."""


AdvantageConfig = Annotated[
    Annotated[GroupAdvantageConfig, Tag("group")]
    | Annotated[MaxRLAdvantageConfig, Tag("max_rl")]
    | Annotated[TurnAdvantageConfig, Tag("turn")]
    | Annotated[CustomAdvantageConfig, Tag("custom")],
    variant("group"),
]


class RewardShapingConfig(BaseConfig):
    """Changes to the rewards of training rollouts; evaluations are not shaped. A stop reason comes from the
    environment, or is "length": cut off at a limit.
    """

    stop_reason_rewards: dict[str, float] = {}
    """The reward of rollouts with that stop reason, whatever the environment paid, e.g. length = -0.5."""
    stop_reason_penalties: dict[str, float] = {}
    """What is subtracted from rollouts with that stop reason, e.g. turn_limit = 0.2."""
    length_of: Literal["rollout", "reply"] = "rollout"
    """What both length penalties are about, in sampled tokens: the whole rollout, or its longest reply."""
    overlong_cache: PositiveInt | None = None
    """Over the last so many tokens before max_length a penalty rises from 0; None is off."""
    overlong_penalty: PositiveFloat = 1.0
    """What that penalty rises to."""
    length_penalty: NonNegativeFloat = 0.0
    """Subtracted in proportion to the length: all of it at max_length. Where the overlong penalty is larger,
    that counts alone."""
    max_length: PositiveInt | None = None
    """The length in tokens at which both penalties are full; None is sampling.max_tokens, of one reply."""
    function: UserFunctionConfig | None = None
    """What a function of your own adds: it sees the task, what was said, and what each component paid."""

    @property
    def measures_length(self) -> bool:
        """True if a penalty depends on the length."""
        return self.overlong_cache is not None or self.length_penalty > 0

    @property
    def may_go_below_zero(self) -> bool:
        """True if a non-negative reward can become negative."""
        replaced_by_less = any(value < 0 for value in self.stop_reason_rewards.values())
        return self.measures_length or replaced_by_less or any(self.stop_reason_penalties.values())

    @model_validator(mode="after")
    def _every_setting_is_used(self) -> RewardShapingConfig:
        default = RewardShapingConfig.model_fields["overlong_penalty"].default
        if self.overlong_penalty != default and self.overlong_cache is None:
            raise conflict(
                "overlong_penalty has no effect without overlong_cache", "overlong_penalty", "overlong_cache"
            )
        if self.length_of == "reply" and not self.measures_length:
            raise conflict(
                "length_of has no effect without overlong_cache or length_penalty",
                "length_of",
                "overlong_cache",
                "length_penalty",
            )
        if self.max_length is not None and not self.measures_length:
            raise conflict(
                "max_length has no effect without overlong_cache or length_penalty",
                "max_length",
                "overlong_cache",
                "length_penalty",
            )
        return self

    @model_validator(mode="after")
    def _one_way_for_a_stop_reason(self) -> RewardShapingConfig:
        both = sorted(self.stop_reason_rewards.keys() & self.stop_reason_penalties.keys())
        if both:
            raise conflict(
                f"stop_reason_rewards and stop_reason_penalties both name {', '.join(both)}: either replace "
                "the reward, or subtract from it",
                "stop_reason_rewards",
                "stop_reason_penalties",
            )
        return self
