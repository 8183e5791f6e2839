"""Sampling settings and sampled tokens, as the client and the servers exchange them.

A reply has JSON, as vLLM sends it. For a client that accepts `ARRAYS_TYPE`, it has arrays of token ids and
log-probs instead, and a request for a later turn may send only its new tokens, after a `Prefix`.

This module imports no other module of Buckeye, because vLLM's server loads it in a separate environment.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]
"""Reason for the end of a sequence: a stop token or string, a token limit, or an abort by the server."""
ARRAYS_TYPE = "application/vnd.buckeye.tokens"
"""Content type of a reply with arrays: MessagePack, with columns of 4 bytes per token."""
_MAX_SHOWN_CHARACTERS = 500
_MAX_KEPT_TOKENS = 1 << 24  # 64 MB

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


class VersionSpan(msgspec.Struct, gc=False):
    """Tokens `start` to `end` - 1 of a reply, which one policy version sampled.

    vLLM reports its initial weights as version `default`.
    """

    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[VersionSpan]
    finish_reason: FinishReason
    index: int = 0


class _Choices(msgspec.Struct):
    choices: list[_Choice]


class SampledArrays(msgspec.Struct):
    """Sampled tokens of one sequence: little-endian int32 token ids, and float32 log-probs."""

    token_ids: bytes
    logprobs: bytes
    weight_versions: list[VersionSpan]
    finish_reason: FinishReason


_DECODER = msgspec.json.Decoder(_Choices)  # reads only these fields of the many that each token has
_ARRAYS = msgspec.msgpack.Decoder(list[SampledArrays])


def parse_generations(body: bytes, content_type: str = "application/json") -> list[Generation]:
    """Return the generations of a reply of /v1/completions or /inference/v1/generate, in their order.

    Raise `ValueError` or `msgspec.DecodeError` if the reply is malformed.
    """
    if content_type == ARRAYS_TYPE:
        return [_from_arrays(choice) for choice in _ARRAYS.decode(body)]
    choices = _DECODER.decode(body).choices
    return [_from_json(choice) for choice in sorted(choices, key=lambda choice: choice.index)]


def _from_json(choice: _Choice) -> Generation:
    values = choice.logprobs.token_logprobs or [entry.logprob for entry in choice.logprobs.content]
    return _generation(choice.token_ids, values, choice.weight_versions, choice.finish_reason)


def _from_arrays(choice: SampledArrays) -> Generation:
    ids, values = np.frombuffer(choice.token_ids, "<i4"), np.frombuffer(choice.logprobs, "<f4")
    return _generation(ids.tolist(), values.tolist(), choice.weight_versions, choice.finish_reason)


def _generation(
    token_ids: list[int], values: list[float], spans: list[VersionSpan], finish_reason: FinishReason
) -> Generation:
    versions: list[int] = []
    for span in spans:
        version = 0 if span.version == "default" else int(span.version)
        versions += [version] * min(span.end - span.start, len(token_ids) + 1)
    if not len(token_ids) == len(values) == len(versions):
        raise ValueError(f"{len(token_ids)} tokens, {len(values)} log-probs, {len(versions)} versions")
    if not all(map(math.isfinite, values)):
        raise ValueError("a log-prob is not a finite number")
    return Generation(token_ids=token_ids, logprobs=values, versions=versions, finish_reason=finish_reason)


# Replies with arrays, and prompts without the tokens of earlier turns.


def accepts_arrays(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True if the headers of a request accept a reply with arrays."""
    return any(name.lower() == b"accept" and ARRAYS_TYPE.encode() in value for name, value in headers)


def sampled_arrays(
    token_ids: Sequence[int], logprobs: Sequence[float], spans: list[VersionSpan], reason: FinishReason
) -> SampledArrays:
    """Return the tokens of one sequence as arrays."""
    ids, values = np.array(token_ids, "<i4"), np.array(logprobs, "<f4")
    return SampledArrays(ids.tobytes(), values.tobytes(), spans, reason)


def json_to_arrays(body: bytes) -> list[SampledArrays]:
    """Convert a reply with JSON. Raise `ValueError` or `msgspec.DecodeError` if it is malformed."""
    return [
        sampled_arrays(choice.token_ids, generation.logprobs, choice.weight_versions, choice.finish_reason)
        for choice in sorted(_DECODER.decode(body).choices, key=lambda choice: choice.index)
        for generation in [_from_json(choice)]
    ]


class Prefix(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Start of a prompt: the first `tokens` of the prompt and the reply of an earlier request."""

    request_id: str
    tokens: Annotated[int, msgspec.Meta(gt=0)]


class KeptPrompts:
    """Prompts and replies of recent requests, for later requests with a `Prefix`.

    Keeps at most `max_tokens` tokens, of 4 bytes each; the least recently used request is dropped first.
    """

    def __init__(self, max_tokens: int = _MAX_KEPT_TOKENS) -> None:
        self._room = max_tokens
        self._kept: OrderedDict[str, npt.NDArray[np.int32]] = OrderedDict()

    def keep(self, request_id: str, prompt: Sequence[int], reply: bytes) -> None:
        """Keep the prompt of a request, and the token ids of its reply (`SampledArrays.token_ids`)."""
        self._drop(request_id)
        ids = np.concatenate([np.array(prompt, np.int32), np.frombuffer(reply, "<i4")])
        self._kept[request_id] = ids
        self._room -= len(ids)
        while self._room < 0:
            self._drop(next(iter(self._kept)))

    def prompt(self, prefix: Prefix, following: Sequence[int]) -> list[int] | None:
        """Return the whole prompt, or None if its prefix is not kept any more."""
        ids = self._kept.get(prefix.request_id)
        if ids is None or len(ids) < prefix.tokens:
            return None
        self._kept.move_to_end(prefix.request_id)
        return [*ids[: prefix.tokens].tolist(), *following]

    def _drop(self, request_id: str) -> None:
        self._room += len(self._kept.pop(request_id, ()))


def error_message(body: bytes) -> str:
    """Return the error message of the body of a server's reply."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")[:_MAX_SHOWN_CHARACTERS] or "no message"
