"""Settings of the buffer, which selects the groups of a batch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from buckeye.config.shared import BaseConfig, variant

Share = Annotated[float, Field(ge=0, le=1)]


class SimpleBufferConfig(BaseConfig):
    """Buffer that uses groups in the order they finish."""

    type: Literal["simple"] = "simple"
    """Selection of the groups of a batch."""
    online_difficulty_filtering: bool = False
    """Drop groups that all rollouts solved, and groups that no rollout solved."""


class OnlineDifficultyBufferConfig(BaseConfig):
    """Buffer that drops groups that are too easy or too hard."""

    type: Literal["online-difficulty"] = "online-difficulty"
    """Selection of the groups of a batch."""
    min_reward: Share = 0.01
    """Drop groups with a smaller mean reward: they are too hard."""
    max_reward: Share = 0.99
    """Drop groups with a larger mean reward: they are too easy."""


BufferConfig = Annotated[
    Annotated[SimpleBufferConfig, Tag("simple")]
    | Annotated[OnlineDifficultyBufferConfig, Tag("online-difficulty")],
    variant("simple"),
]
