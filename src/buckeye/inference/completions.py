"""The routes that sample: /inference/v1/generate, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from buckeye.errors import InferenceError, UsageError
from buckeye.inference.answers import Answer, ChatAnswer, Choice, CompletionAnswer
from buckeye.inference.protocol import ChatRequest, CompletionRequest, GenerateRequest, TextRequest, parse
from buckeye.inference.responses import EventStream, json_response
from buckeye.inference.service import Service, Submission

_DEFAULT_MAX_TOKENS = 16
_LONG_BODY = 2**20

T = TypeVar("T")


async def generate(request: Request) -> Response:
    """Token ids in, token ids and log-probs out."""
    service: Service = request.app.state.service
    body = parse(await request.body(), GenerateRequest)
    service.check_model(body.model)
    sampling = body.sampling_params
    if sampling.logprobs != 1:  # what clients of vLLM's route send for the sampled token's own
        _check_logprobs(sampling.logprobs)
    if body.stream:
        raise UsageError("`stream` is not supported on this route; /v1/completions streams token ids too.")
    max_tokens = sampling.max_tokens or _DEFAULT_MAX_TOKENS
    sequences = service.sequences([body.token_ids], sampling, max_tokens=max_tokens, streamed=False)
    request_id = body.request_id or f"generate-{uuid.uuid4().hex}"
    async with Submission(service, request_id, sequences, request) as submission:
        await submission.finished()
    choices = []
    for index, sequence in enumerate(sequences):
        if sequence.error is not None:
            raise InferenceError(sequence.error)
        pairs = zip(sequence.token_ids, sequence.logprobs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
        spans = sequence.version_spans()
        choices.append(
            {
                "index": index,
                "token_ids": sequence.token_ids,
                "logprobs": None if sampling.logprobs is None else {"content": content},
                "finish_reason": sequence.finish_reason,
                "weight_versions": [{"version": str(v), "start": s, "end": e} for v, s, e in spans],
            }
        )
    return json_response({"request_id": request_id, "choices": choices})


async def completions(request: Request) -> Response:
    """OpenAI's completions; the prompt may be token ids, or a list of prompts."""
    service: Service = request.app.state.service
    raw = await request.body()
    body = parse(raw, CompletionRequest)
    service.check_model(body.model)
    _check_logprobs(body.logprobs)
    prompts = await _prepared(len(raw), service.prompts, body.prompt)
    max_tokens = body.max_tokens or _DEFAULT_MAX_TOKENS
    answer = CompletionAnswer(service, body, prompts, with_logprobs=body.logprobs is not None)
    return await _answer(request, service, body, prompts, max_tokens, answer)


async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions, with tools and reasoning."""
    service: Service = request.app.state.service
    raw = await request.body()
    body = parse(raw, ChatRequest)
    service.check_model(body.model)
    _check_logprobs(body.top_logprobs)
    conversation = await _prepared(len(raw), service.conversation, body.messages, body.offered_tools())
    max_tokens = body.max_completion_tokens or body.max_tokens or service.max_len
    answer = ChatAnswer(service, body, conversation)
    return await _answer(request, service, body, [conversation.ids], max_tokens, answer)


async def _prepared(size: int, prepare: Callable[..., T], *arguments: Any) -> T:
    """`prepare(*arguments)`: for a long body in another thread, so that the streams of others go on."""
    if size < _LONG_BODY:
        return prepare(*arguments)
    return await asyncio.to_thread(prepare, *arguments)


async def _answer(
    request: Request,
    service: Service,
    body: TextRequest,
    prompts: list[list[int]],
    max_tokens: int,
    answer: Answer,
) -> Response:
    stops = body.stop_strings()
    if stops:
        service.require_text()  # without text no stop string would ever be found
    sequences = service.sequences(prompts, body, max_tokens=max_tokens, streamed=body.stream or bool(stops))
    choices = [Choice(service, index, sequence, stops) for index, sequence in enumerate(sequences)]
    request_id = body.request_id or f"{answer.id_prefix}-{uuid.uuid4().hex}"
    answer.begin(request_id, choices)
    submission = Submission(service, request_id, sequences, request)
    if body.stream:
        return EventStream(_stream(submission, choices, answer, body))
    async with submission:
        while any(choice.finish_reason is None for choice in choices):
            await submission.news()
            for choice in choices:
                choice.advance()
    for choice in choices:
        choice.raise_error()
    return json_response(answer.whole(choices))


async def _stream(
    submission: Submission, choices: list[Choice], answer: Answer, body: TextRequest
) -> AsyncGenerator[Any, None]:
    for choice in choices:
        if (opening := answer.opening(choice)) is not None:
            yield opening
    going_on = choices
    async with submission:
        while going_on:
            await submission.news()
            for choice in going_on:
                start, end = choice.advance()
                choice.raise_error()
                if (part := answer.part(choice, start, end)) is not None:
                    yield part
            going_on = [choice for choice in going_on if choice.finish_reason is None]
    if body.stream_options is not None and body.stream_options.include_usage:
        yield answer.usage_part(choices)


def _check_logprobs(count: int | None) -> None:
    if count:
        raise UsageError(
            "This server returns the log-prob of the sampled token only: ask for 0 top log-probs, not "
            f"{count}. (`logprobs: 0` of a completion, `logprobs: true` of a chat.)"
        )
