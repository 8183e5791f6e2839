"""The route for token ids: /inference/v1/generate. No text is made on it, and no tokenizer is needed."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from buckeye.dialects.answers import least, usage_fields
from buckeye.dialects.openai import GenerateRequest, parse
from buckeye.errors import InferenceError
from buckeye.inference.responses import EventStream, json_response
from buckeye.inference.sequences import Sequence
from buckeye.inference.service import DEFAULT_MAX_TOKENS, Service, Submission


async def generate(request: Request) -> Response:
    """Token ids in, token ids and log-probs out, whole or in parts."""
    service: Service = request.app.state.service
    body = parse(await request.body(), GenerateRequest)
    service.check_model(body.model)
    sampling = body.sampling_params
    sequences = service.sequences(
        [body.token_ids],
        sampling,
        max_tokens=sampling.max_tokens or DEFAULT_MAX_TOKENS,
        streamed=body.stream,
        top_logprobs=sampling.logprobs,
    )
    request_id = body.request_id or f"generate-{uuid.uuid4().hex}"
    submission = Submission(service, request_id, sequences, request)
    if body.stream:
        return EventStream(_events(submission, body, request_id, sequences))
    async with submission:
        await submission.finished()
    choices = []
    for index, sequence in enumerate(sequences):
        _raise_error(sequence)
        choice = _part(index, sequence, 0, len(sequence.token_ids), sampling.logprobs)
        choices.append(choice | _ending(sequence))
    return json_response({"request_id": request_id, "choices": choices})


async def _events(
    submission: Submission, body: GenerateRequest, request_id: str, sequences: list[Sequence]
) -> AsyncGenerator[Any, None]:
    """An event for the news of each sequence, the last one with how it ended."""
    told = [0] * len(sequences)
    going_on = dict(enumerate(sequences))
    async with submission:
        while going_on:
            await submission.news()
            for index, sequence in tuple(going_on.items()):
                ended = sequence.finish_reason is not None  # read before the tokens: it is written after them
                _raise_error(sequence)
                start, told[index] = told[index], len(sequence.logprobs)
                if not ended and start == told[index]:
                    continue
                choice = _part(index, sequence, start, told[index], body.sampling_params.logprobs)
                if ended:
                    del going_on[index]
                    choice |= _ending(sequence)
                yield {"request_id": request_id, "choices": [choice]}
    if body.stream_options is not None and body.stream_options.include_usage:
        yield {"request_id": request_id, "choices": [], "usage": _usage(body, sum(told))}


def _part(index: int, sequence: Sequence, start: int, end: int, top: int | None) -> dict[str, Any]:
    """The tokens start..end of a sequence; `top` is how many log-probs were asked for beside each one's own,
    None for none at all."""
    return {
        "index": index,
        "token_ids": sequence.token_ids[start:end],
        "logprobs": None if top is None else {"content": _logprobs(sequence, start, end)},
        "finish_reason": None,
        "weight_versions": None,
    }


def _logprobs(sequence: Sequence, start: int, end: int) -> list[dict[str, Any]]:
    tops = sequence.top_logprobs[start:end] or [[]] * (end - start)
    return [
        {
            "token_id": token,
            "logprob": logprob,
            "top_logprobs": [{"token_id": other, "logprob": least(value)} for other, value in top],
        }
        for token, logprob, top in zip(
            sequence.token_ids[start:end], sequence.logprobs[start:end], tops, strict=True
        )
    ]


def _ending(sequence: Sequence) -> dict[str, Any]:
    spans = sequence.version_spans()
    return {
        "finish_reason": sequence.finish_reason,
        "weight_versions": [
            {"version": str(version), "start": start, "end": end} for version, start, end in spans
        ],
    }


def _usage(body: GenerateRequest, sampled: int) -> dict[str, int]:
    return usage_fields(len(body.token_ids), sampled)


def _raise_error(sequence: Sequence) -> None:
    if sequence.error is not None:
        raise InferenceError(sequence.error)
