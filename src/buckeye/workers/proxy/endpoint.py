"""One rollout at the wire: its address, its limits, what was asked, and how it ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

StopReason = Literal["max_turns", "max_tokens", "timeout", "context"]
"""Which limit a rollout has come to; `context`: its conversation has filled the model's context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much one rollout may ask for; None is no limit of the wire's own."""

    max_turns: int | None = None
    """Replies."""
    max_tokens: int | None = None
    """Sampled tokens, of all replies together."""
    seconds: float | None = None
    """From the opening of the endpoint on."""


@dataclass(slots=True)
class Usage:
    """What was asked of one endpoint. It stays readable after the endpoint is closed."""

    calls: int = 0
    """Requests for replies, refused ones included."""
    turns: int = 0
    """Replies sampled."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Settings of requests that were not followed, and how often."""
    stop_reason: StopReason | None = None
    """The limit that ended the rollout, None if none did."""
    failure: str | None = None
    """Why the policy could not answer: then the rollout is an error, and is never scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where one rollout is served, and the key that opens it."""

    root_url: str
    """`http://127.0.0.1:PORT/rollouts/ID`: what Anthropic's clients call their base URL."""
    api_key: str = field(repr=False)
    model: str
    """The name that `GET v1/models` tells. Requests may give any."""
    usage: Usage = field(default_factory=Usage)

    @property
    def base_url(self) -> str:
        """What OpenAI's clients call their base URL: it ends in /v1."""
        return f"{self.root_url}/v1"
