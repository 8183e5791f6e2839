"""The routes that sample: /inference/v1/generate, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from buckeye.errors import InferenceError, UsageError
from buckeye.inference.answers import Answer, ChatAnswer, Choice, CompletionAnswer
from buckeye.inference.protocol import ChatRequest, CompletionRequest, GenerateRequest, TextRequest, parse
from buckeye.inference.responses import EventStream, json_response
from buckeye.inference.service import Service, Submission

_DEFAULT_MAX_TOKENS = 16


async def generate(request: Request) -> Response:
    """Token ids in, token ids and log-probs out."""
    service: Service = request.app.state.service
    body = parse(await request.body(), GenerateRequest)
    service.check_model(body.model)
    sampling = body.sampling_params
    if sampling.logprobs != 1:  # what clients of vLLM's route send for the sampled token's own
        _check_logprobs(sampling.logprobs)
    if body.stream:
        raise UsageError("`stream` is not supported on this route.")
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
    body = parse(await request.body(), CompletionRequest)
    service.check_model(body.model)
    _check_logprobs(body.logprobs)
    prompts = service.prompts(body.prompt)
    max_tokens = body.max_tokens or _DEFAULT_MAX_TOKENS
    answer = CompletionAnswer(service, body, with_logprobs=body.logprobs is not None)
    return await _answer(request, service, body, prompts, max_tokens, answer)


async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions, without tools."""
    service: Service = request.app.state.service
    body = parse(await request.body(), ChatRequest)
    service.check_model(body.model)
    _check_logprobs(body.top_logprobs)
    prompt = service.renderer.render(_plain_messages(body.messages)).ids
    max_tokens = body.max_completion_tokens or body.max_tokens or service.max_len
    answer = ChatAnswer(service, body, with_logprobs=bool(body.logprobs))
    return await _answer(request, service, body, [prompt], max_tokens, answer)


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
    answer.begin(request_id, prompts)
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
    ended: set[int] = set()
    async with submission:
        while len(ended) < len(choices):
            await submission.news()
            for choice in choices:
                if choice.index in ended:
                    continue
                start, end = choice.advance()
                choice.raise_error()
                last = choice.finish_reason is not None
                part = choice.text.take(final=last)
                if part or last or (answer.shows_tokens and end > start):
                    yield answer.part(choice, part, start, end)
                if last:
                    ended.add(choice.index)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield answer.usage_part(choices)


def _check_logprobs(count: int | None) -> None:
    if count:
        raise UsageError(
            "This server returns the log-prob of the sampled token only: ask for 0 top log-probs, not "
            f"{count}. (`logprobs: 0` of a completion, `logprobs: true` of a chat.)"
        )


def _plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is text, lists of text parts joined. Raises `UsageError` for anything else."""
    if not messages:
        raise UsageError("Bad request: `messages` is empty.")
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise UsageError(f"Bad request: `messages[{index}].role` must be a text.")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_part_text(part, index) for part in content)
        if content is not None and not isinstance(content, str):
            raise UsageError(
                f"Bad request: `messages[{index}].content` must be a text or a list of text parts."
            )
        plain.append({**message, "content": content or ""})
    return plain


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise UsageError(f"Bad request: `messages[{index}].content` has a part that is not text.")
