"""Settings of the buffer: which groups of rollouts make a batch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from buckeye.config.base import BaseConfig, variant

Share = Annotated[float, Field(ge=0, le=1)]


class SimpleBufferConfig(BaseConfig):
    """Groups are used in the order they finish."""

    type: Literal["simple"] = "simple"
    """How the groups of a batch are chosen."""
    seed: int | None = None
    """Seed of the choice."""
    from_scratch: bool = True
    """Start with an empty buffer."""
    easy_fraction: Share = 0.0
    """Share of the batch that is drawn from easy tasks."""
    hard_fraction: Share = 0.0
    """Share of the batch that is drawn from hard tasks."""
    easy_threshold: Share | None = None
    """Tasks with a mean reward of at least this are easy."""
    hard_threshold: Share | None = None
    """Tasks with a mean reward of at most this are hard."""
    online_difficulty_filtering: bool = False
    """Drop groups that were solved by all rollouts, or by none."""


class DifficultyPoolBufferConfig(BaseConfig):
    """Tasks are drawn from pools by difficulty."""

    type: Literal["difficulty-pool"] = "difficulty-pool"
    """How the groups of a batch are chosen."""
    seed: int | None = None
    """Seed of the choice."""
    from_scratch: bool = True
    """Start with an empty buffer."""
    easy_border: Share = 0.8
    """Tasks with a larger mean reward are easy."""
    hard_border: Share = 0.2
    """Tasks with a smaller mean reward are hard."""
    easy_fraction: Share = 0.1
    """Share of easy tasks."""
    hard_fraction: Share = 0.1
    """Share of hard tasks."""


class OnlineDifficultyBufferConfig(BaseConfig):
    """Groups that are too easy or too hard are dropped."""

    type: Literal["online-difficulty"] = "online-difficulty"
    """How the groups of a batch are chosen."""
    seed: int | None = None
    """Seed of the choice."""
    from_scratch: bool = True
    """Start with an empty buffer."""
    min_reward: Share = 0.01
    """Groups with a smaller mean reward are too hard and dropped."""
    max_reward: Share = 0.99
    """Groups with a larger mean reward are too easy and dropped."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """How many more groups are kept in flight than a batch needs."""


BufferConfig = Annotated[
    Annotated[SimpleBufferConfig, Tag("simple")]
    | Annotated[DifficultyPoolBufferConfig, Tag("difficulty-pool")]
    | Annotated[OnlineDifficultyBufferConfig, Tag("online-difficulty")],
    variant("simple"),
]
