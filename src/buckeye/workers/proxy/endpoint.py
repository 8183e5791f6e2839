"""Endpoint of one rollout: its address, limits and usage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

StopReason = Literal["max_turns", "max_tokens", "timeout", "context"]
"""Limit that a rollout has reached. `context`: the conversation fills the model's context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits that the proxy enforces for one rollout. None: no limit."""

    max_turns: int | None = None
    """Maximum number of replies."""
    max_tokens: int | None = None
    """Maximum number of sampled tokens over all replies."""
    seconds: float | None = None
    """Maximum number of seconds after the endpoint was opened."""


@dataclass(slots=True)
class Usage:
    """Usage of one endpoint. It stays readable after the endpoint is closed."""

    calls: int = 0
    """Requests for replies, including refused ones."""
    turns: int = 0
    """Sampled replies."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of ignored request settings, by name."""
    stop_reason: StopReason | None = None
    """Limit that ended the rollout, or None."""
    failure: str | None = None
    """Reason why the policy could not answer. The rollout is then an error and is never scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address and key that a client needs to call the policy for one rollout."""

    root_url: str
    """`http://127.0.0.1:PORT/rollouts/ID`: the base URL for Anthropic clients."""
    api_key: str = field(repr=False)
    model: str
    """Model name that `GET v1/models` returns. Requests may use any name."""
    usage: Usage = field(default_factory=Usage)

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients; it ends in /v1."""
        return f"{self.root_url}/v1"
