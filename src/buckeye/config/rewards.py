"""Settings of reward shaping and advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, Tag, model_validator

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


class MaxRLAdvantageConfig(BaseConfig):
    """Reward minus its group's mean, divided by that mean: rarely solved tasks get more weight."""

    type: Literal["max_rl"] = "max_rl"
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
    | Annotated[MaxRLAdvantageConfig, Tag("max_rl")]
    | Annotated[TurnAdvantageConfig, Tag("turn")]
    | Annotated[CustomAdvantageConfig, Tag("custom")],
    variant("group"),
]


class RewardShapingConfig(BaseConfig):
    """Changes to the rewards of training rollouts.

    Evaluations are not shaped. The environment sets the stop reason; "length" means truncated at a limit.
    """

    stop_reason_rewards: dict[str, float] = {}
    """Rewards by stop reason, which replace those of the environment. Example: length = -0.5."""
    stop_reason_penalties: dict[str, float] = {}
    """Penalties by stop reason, subtracted from the reward. Example: turn_limit = 0.2."""
    length_of: Literal["rollout", "reply"] = "rollout"
    """Length for both penalties, in sampled tokens: of the rollout, or of its longest reply."""
    overlong_cache: PositiveInt | None = None
    """Number of tokens before max_length over which the overlong penalty rises from 0. None: off."""
    overlong_penalty: PositiveFloat = 1.0
    """Overlong penalty at max_length."""
    length_penalty: NonNegativeFloat = 0.0
    """Penalty at max_length, in proportion to the length. If the overlong penalty is larger, only that
    applies."""
    max_length: PositiveInt | None = None
    """Length in tokens with the full penalties. None: sampling.max_tokens, which limits one reply."""
    function: UserFunctionConfig | None = None
    """User function that adds to the reward. It gets the task, the messages and the reward components."""

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
        length = "`overlong_cache` or `length_penalty`"
        for name, needed, is_met in (
            ("overlong_penalty", "`overlong_cache`", self.overlong_cache is not None),
            ("length_of", length, self.measures_length),
            ("max_length", length, self.measures_length),
        ):
            if not is_met and getattr(self, name) != RewardShapingConfig.model_fields[name].default:
                raise conflict(
                    f"`{name}` has no effect without {needed}",
                    hint=f"set {needed}, or leave `{name}` out",
                )
        return self

    @model_validator(mode="after")
    def _one_way_for_a_stop_reason(self) -> RewardShapingConfig:
        both = sorted(self.stop_reason_rewards.keys() & self.stop_reason_penalties.keys())
        if both:
            raise conflict(
                f"`stop_reason_rewards` and `stop_reason_penalties` both have {', '.join(both)}",
                hint="either replace the reward of a stop reason, or subtract from it",
            )
        return self
