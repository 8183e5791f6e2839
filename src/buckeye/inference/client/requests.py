"""What the client sends and how it reads the answers. No input or output happens here."""

from __future__ import annotations

import math
from typing import Any

import httpx

from buckeye.inference.types import Generation, SamplingParams

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
