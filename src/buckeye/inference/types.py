"""What a request for tokens says and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
"""Why a sequence ended: by a stop token, at a limit, or given up by the server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample one sequence.

    `temperature` 0 is greedy. `top_p` 1 and `top_k` -1 keep the whole vocabulary. Until `min_tokens` are
    sampled, no stop token can be. The sampled tokens depend on `seed`, the position and the distribution, on
    nothing else. At every position the `top_logprobs` most likely tokens are told too.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sampled sequence; three aligned lists, one entry a token, the stop token included.

    `logprobs` are of the distribution that was sampled from (after temperature, top-p and top-k; at
    temperature 0 that of the model). `versions` are policy versions.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
