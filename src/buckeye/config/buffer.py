"""Settings of the buffer, which selects the groups of a batch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from buckeye.config.shared import BaseConfig, variant

Share = Annotated[float, Field(ge=0, le=1)]


class SimpleBufferConfig(BaseConfig):
    """Buffer that uses groups in the order they finish."""

    type: Literal["simple"] = "simple"
    """How the groups of a batch are chosen."""
    online_difficulty_filtering: bool = False
    """Drop groups that were solved by all rollouts, or by none."""


class OnlineDifficultyBufferConfig(BaseConfig):
    """Buffer that drops groups that are too easy or too hard."""

    type: Literal["online-difficulty"] = "online-difficulty"
    """How the groups of a batch are chosen."""
    min_reward: Share = 0.01
    """Groups with a smaller mean reward are too hard and dropped."""
    max_reward: Share = 0.99
    """Groups with a larger mean reward are too easy and dropped."""


BufferConfig = Annotated[
    Annotated[SimpleBufferConfig, Tag("simple")]
    | Annotated[OnlineDifficultyBufferConfig, Tag("online-difficulty")],
    variant("simple"),
]
