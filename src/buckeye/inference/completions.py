"""The routes that answer in text: /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from buckeye.dialects.openai import ChatRequest, CompletionRequest, TextRequest, parse
from buckeye.inference.answers import Answer, ChatAnswer, Choice, CompletionAnswer
from buckeye.inference.render.forcing import NO_OPENING, call_opening
from buckeye.inference.responses import EventStream, json_response
from buckeye.inference.service import DEFAULT_MAX_TOKENS, Service, Submission

_LONG_BODY = 2**20

T = TypeVar("T")


async def completions(request: Request) -> Response:
    """OpenAI's completions; the prompt may be token ids, or a list of prompts."""
    service: Service = request.app.state.service
    raw = await request.body()
    body = parse(raw, CompletionRequest)
    service.check_model(body.model)
    prompts = await _prepared(len(raw), service.prompts, body.prompt)
    max_tokens = body.max_tokens or DEFAULT_MAX_TOKENS
    answer = CompletionAnswer(service, body, prompts, top_logprobs=body.logprobs)
    return await _answer(request, service, body, prompts, max_tokens, answer)


async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions, with tools and reasoning."""
    service: Service = request.app.state.service
    raw = await request.body()
    body = parse(raw, ChatRequest)
    service.check_model(body.model)
    conversation = await _prepared(len(raw), service.conversation, body.messages, body.offered_tools())
    max_tokens = body.max_completion_tokens or body.max_tokens or service.max_len
    opening = NO_OPENING
    if body.forces_a_call:
        opening = call_opening(service.renderer, conversation, body.forced_tool())
    answer = ChatAnswer(service, body, conversation, opening)
    return await _answer(request, service, body, answer.prompts, max_tokens, answer)


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
    sequences = service.sequences(
        prompts,
        body,
        max_tokens=max_tokens,
        streamed=body.stream or bool(stops),
        top_logprobs=answer.top_logprobs,
    )
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
