"""Settings of a model that grades replies: the file of the reward `judge:FILE`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from buckeye.config.shared import BaseConfig, Conflicts, conflict


class JudgeConfig(BaseConfig):
    """Model that grades replies, its request, and its limits."""

    model: str = ""
    """Name of the judge on its server."""
    base_url: str | None = None
    """Address of its server, as http://host:port/v1. None: the policy grades its own replies."""
    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable with the key of the server."""
    prompt: Annotated[str, Field(min_length=1)]
    """Request. `{prompt}`, `{reply}`, `{answer}` and `{COLUMN}` are replaced by their texts."""
    scale: tuple[float, float] = (0.0, 1.0)
    """Worst and best grade. The last number in the judge's text is the grade."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge."""
    max_tokens: PositiveInt = 512
    """Maximum length of its text, in tokens."""
    timeout: PositiveFloat = 120.0
    """Timeout of a request, in seconds."""
    max_concurrent: PositiveInt = 32
    """Maximum number of requests at a time, in each process that grades."""
    rate_limit: PositiveFloat | None = None
    """Maximum number of requests per second, in each process that grades."""
    prices: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 0.0)
    """Price of a million tokens of requests, and of texts."""
    max_cost: PositiveFloat | None = None
    """Maximum cost in each process that grades. Later replies are errors."""
    cache: str | None = None
    """File of known grades. New grades are added to it. At a start, it keeps the newest 100,000."""
    labels: str | None = None
    """Rows of the dataset with a `reply` and its `label`, a grade by a person."""

    def conflicts(self) -> Conflicts:
        if self.base_url is not None and not self.model:
            yield conflict("`base_url` needs a `model`", "model")
        if self.base_url is None and self.cache is not None:
            yield conflict("`cache` needs a `base_url`, because the policy changes", "cache")
        if self.scale[0] >= self.scale[1]:
            yield conflict("`scale` must have the worst grade first", "scale")
        if self.max_cost is not None and not any(self.prices):
            yield conflict("`max_cost` needs `prices`", "max_cost")
