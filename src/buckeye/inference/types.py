"""Sampling settings and sampled tokens, as the client and the servers exchange them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]
"""Reason for the end of a sequence: a stop token or string, a token limit, or an abort by the server."""
_MAX_SHOWN_CHARACTERS = 500

TokenIds = Sequence[int] | npt.NDArray[np.int32]
"""Token ids of a prompt, as a list or as a column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling settings of one sequence.

    `temperature` 0 selects the most likely token. `top_p` 1 and `top_k` -1 keep the whole vocabulary. No stop
    token is sampled before `min_tokens` tokens. A sampled token depends only on `seed`, its position and the
    distribution. `top_logprobs` requests the n most likely tokens of every position.
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
    """Sampled tokens of one sequence. The three lists have one entry per token, stop token included.

    `logprobs` are log-probs under the sampling distribution, after temperature, top-p and top-k. At
    temperature 0 they are log-probs under the model's distribution. `versions` has the policy version that
    sampled each token. `queued_seconds` passed before a server had the request.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    queued_seconds: float = field(default=0.0, compare=False)


_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name != "top_logprobs")


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling fields of a request."""
    return {name: getattr(params, name) for name in _SAMPLING_FIELDS}


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry] = []
    token_logprobs: list[float] = []


class _Span(msgspec.Struct, gc=False):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]
    finish_reason: FinishReason
    index: int = 0


class _Choices(msgspec.Struct):
    choices: list[_Choice]


_DECODER = msgspec.json.Decoder(_Choices)  # reads only these fields of the many that each token has


def parse_generations(body: bytes) -> list[Generation]:
    """Return the generations of a reply of /v1/completions or /inference/v1/generate, in their order.

    Raise `ValueError` or `msgspec.DecodeError` if the reply is malformed.
    """
    choices = _DECODER.decode(body).choices
    return [_generation(choice) for choice in sorted(choices, key=lambda choice: choice.index)]


def _generation(choice: _Choice) -> Generation:
    token_ids = choice.token_ids
    values = choice.logprobs.token_logprobs or [entry.logprob for entry in choice.logprobs.content]
    versions: list[int] = []
    for span in choice.weight_versions:
        # vLLM reports its initial weights as version `default`
        version = 0 if span.version == "default" else int(span.version)
        versions += [version] * (span.end - span.start)
    if not len(token_ids) == len(values) == len(versions):
        raise ValueError(f"{len(token_ids)} tokens, {len(values)} log-probs, {len(versions)} versions")
    if not all(map(math.isfinite, values)):
        raise ValueError("a log-prob is not a finite number")
    return Generation(
        token_ids=token_ids, logprobs=values, versions=versions, finish_reason=choice.finish_reason
    )


def error_message(body: bytes) -> str:
    """Return the error message of the body of a server's reply."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")[:_MAX_SHOWN_CHARACTERS] or "no message"
