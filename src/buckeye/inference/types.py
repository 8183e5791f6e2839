"""What a request for tokens says and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import httpx

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


_SHOWN_BODY = 500


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields of a request that say how to sample."""
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "min_tokens": params.min_tokens,
        "stop_token_ids": list(params.stop_token_ids),
    }


def version_of(named: str | int) -> int:
    """A policy version. vLLM calls the weights it was started with `default`."""
    return 0 if named == "default" else int(named)


def generation_of(choice: dict[str, Any]) -> Generation:
    """From a choice of either route. Raises `KeyError`, `TypeError` or `ValueError` if it is not one."""
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]
    values = (
        logprobs["token_logprobs"]
        if "token_logprobs" in logprobs
        else [e["logprob"] for e in logprobs["content"]]
    )
    versions: list[int] = []
    for span in choice["weight_versions"]:
        versions += [version_of(span["version"])] * (span["end"] - span["start"])
    if not len(token_ids) == len(values) == len(versions):
        raise ValueError(f"{len(token_ids)} tokens, {len(values)} log-probs, {len(versions)} versions")
    if not all(map(math.isfinite, values)):
        raise ValueError("a log-prob is no finite number")
    if choice["finish_reason"] not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {choice['finish_reason']!r}")
    return Generation(
        token_ids=token_ids, logprobs=values, versions=versions, finish_reason=choice["finish_reason"]
    )


def error_message(response: httpx.Response) -> str:
    """What a server says is wrong."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:_SHOWN_BODY] or "no message"
