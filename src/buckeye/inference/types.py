"""Requests for tokens and their results."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx

FinishReason = Literal["stop", "length", "abort"]
"""Reason for the end of a sequence: a stop token, a limit, or an abort by the server."""
_MAX_SHOWN_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling settings of one sequence.

    `temperature` 0 is greedy. `top_p` 1 and `top_k` -1 keep the whole vocabulary. No stop token is sampled
    before `min_tokens` tokens. The sampled tokens depend only on `seed`, the position and the distribution.
    For every position the `top_logprobs` most likely tokens are returned too.
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
    """Sampled sequence, as three aligned lists with one entry per token, stop token included.

    `logprobs` refer to the sampling distribution, after temperature, top-p and top-k. At temperature 0 they
    refer to the model's distribution. `versions` are policy versions.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling fields of a request."""
    fields = asdict(params)
    del fields["top_logprobs"]
    return fields


def parse_generation(choice: dict[str, Any]) -> Generation:
    """Convert a choice of either route to a `Generation`.

    Raise `KeyError`, `TypeError` or `ValueError` if it is malformed.
    """
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]
    values = (
        logprobs["token_logprobs"]
        if "token_logprobs" in logprobs
        else [e["logprob"] for e in logprobs["content"]]
    )
    versions: list[int] = []
    for span in choice["weight_versions"]:
        # vLLM names its initial weights `default`
        version = 0 if span["version"] == "default" else int(span["version"])
        versions += [version] * (span["end"] - span["start"])
    if not len(token_ids) == len(values) == len(versions):
        raise ValueError(f"{len(token_ids)} tokens, {len(values)} log-probs, {len(versions)} versions")
    if not all(map(math.isfinite, values)):
        raise ValueError("a log-prob is not a finite number")
    if choice["finish_reason"] not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {choice['finish_reason']!r}")
    return Generation(
        token_ids=token_ids, logprobs=values, versions=versions, finish_reason=choice["finish_reason"]
    )


def error_message(response: httpx.Response) -> str:
    """Return the error message of a server's response."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:_MAX_SHOWN_CHARACTERS] or "no message"
