"""OpenAI's completions route for texts, and vLLM's generate route for token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from buckeye.chat.openai_api import (
    CompletionRequest,
    GenerateRequest,
    GenerateSampling,
    completion_logprobs,
    convert_request,
    generate_logprobs,
)
from buckeye.envs.base import CallOptions, Reply
from buckeye.workers.proxy.chat import openai_events, openai_usage
from buckeye.workers.proxy.errors import WireError
from buckeye.workers.proxy.exchange import Exchange, new_id
from buckeye.workers.proxy.request_fields import FIELDS_WITHOUT_EFFECT, field_names, split_fields
from buckeye.workers.proxy.rollout import PolicyCall, ProxyRollout

_COMPLETION_FIELDS = (
    field_names(CompletionRequest, exclude=("temperature", "top_p", "top_k", "seed", "min_tokens"))
    - FIELDS_WITHOUT_EFFECT
)
_GENERATE_FIELDS = field_names(GenerateRequest) - FIELDS_WITHOUT_EFFECT
_SAMPLING_FIELDS = frozenset({"max_tokens", "n", "stop_token_ids", "logprobs"})


def read(rollout: ProxyRollout, fields: Any) -> Exchange:
    """Read a request to complete one prompt, a text or token ids. Raises `WireError` or `UsageError`."""
    kept, dropped = split_fields(fields, _COMPLETION_FIELDS, model=rollout.model)
    body = convert_request(kept, CompletionRequest)
    call = PolicyCall(
        prompt=_single_prompt(body.prompt),
        options=CallOptions(
            max_tokens=body.max_tokens or 16,  # OpenAI's default for this route
            stop=body.stop_strings(),
            stop_token_ids=tuple(body.stop_token_ids or ()),
        ),
        n=body.n or 1,
        dropped=dropped,
    )
    head = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time())}
    head["model"] = rollout.model

    def to_json(replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [_completion_choice(rollout, body, index, reply) for index, reply in enumerate(replies)]
        return {**head, "choices": choices, "usage": openai_usage(replies)}

    def to_events(replies: Sequence[Reply]) -> list[bytes]:
        response = to_json(replies)
        usage = response.pop("usage")
        parts = [{**response, "choices": [choice]} for choice in response["choices"]]
        if body.stream_options is not None and body.stream_options.include_usage:
            parts.append({**head, "choices": [], "usage": usage})
        return openai_events(parts)

    return Exchange(call=call, is_streaming=body.stream, to_json=to_json, to_events=to_events)


def read_generate(rollout: ProxyRollout, fields: Any) -> Exchange:
    """Read a request to continue token ids. Raises `WireError` or `UsageError`."""
    kept, dropped = split_fields(fields, _GENERATE_FIELDS | {"return_token_ids"}, model=rollout.model)
    shows_prompt = bool(kept.pop("return_token_ids", False))
    if isinstance(kept.get("sampling_params"), dict):
        kept["sampling_params"], ignored = split_fields(kept["sampling_params"], _SAMPLING_FIELDS)
        dropped += ignored
    body = convert_request(kept, GenerateRequest)
    sampling = body.sampling_params
    stop_ids = tuple(sampling.stop_token_ids or ())
    call = PolicyCall(
        prompt=body.token_ids,
        options=CallOptions(max_tokens=sampling.max_tokens, stop_token_ids=stop_ids),
        n=sampling.n or 1,
        dropped=dropped,
    )
    request_id = new_id("generate-")

    def to_json(replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [_generate_choice(sampling, index, reply) for index, reply in enumerate(replies)]
        response = {"request_id": request_id, "choices": choices}
        return response | {"prompt_token_ids": body.token_ids} if shows_prompt else response

    def to_events(replies: Sequence[Reply]) -> list[bytes]:
        return openai_events([to_json(replies)])

    return Exchange(call=call, is_streaming=body.stream, to_json=to_json, to_events=to_events)


def _single_prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a list with one prompt
    if isinstance(prompt, str):
        return prompt
    if not prompt or not all(isinstance(token, int) and token >= 0 for token in prompt):
        raise WireError(400, "`prompt` must be one text or one list of token ids.")
    return prompt


def _completion_choice(
    rollout: ProxyRollout, body: CompletionRequest, index: int, reply: Reply
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": reply.text,
        "finish_reason": reply.finish_reason,
        "logprobs": None,
    }
    tokens = reply.tokens
    if tokens is None:
        return choice
    if body.return_token_ids:
        choice |= {"prompt_token_ids": list(tokens.prompt_ids), "token_ids": list(tokens.token_ids)}
    if body.logprobs is not None:
        texts = [rollout.token_text(token) for token in tokens.token_ids]
        choice["logprobs"] = completion_logprobs(texts, tokens.logprobs)
    return choice


def _generate_choice(sampling: GenerateSampling, index: int, reply: Reply) -> dict[str, Any]:
    tokens = reply.tokens
    ids, values = ([], []) if tokens is None else (list(tokens.token_ids), tokens.logprobs)
    sampled = ((token, value, ()) for token, value in zip(ids, values, strict=True))
    return {
        "index": index,
        "token_ids": ids,
        "logprobs": None if sampling.logprobs is None else generate_logprobs(sampled),
        "finish_reason": reply.finish_reason,
    }
