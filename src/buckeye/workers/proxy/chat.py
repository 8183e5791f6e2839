"""OpenAI's chat completions route."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from buckeye.chat.messages import ToolChoice
from buckeye.chat.openai_api import (
    ChatRequest,
    chat_delta,
    chat_logprobs,
    chat_message,
    usage_fields,
)
from buckeye.envs.base import Reply
from buckeye.workers.proxy.exchange import Exchange, allows_one_call, chat_call, new_id
from buckeye.workers.proxy.reply_parts import ReplyParts, split_reply
from buckeye.workers.proxy.request_fields import FIELDS_WITHOUT_EFFECT, field_names, split_fields
from buckeye.workers.proxy.rollout import ProxyRollout

_FIELDS = field_names(
    ChatRequest, exclude=("temperature", "top_p", "top_k", "seed", "min_tokens", "top_logprobs")
)
_FIELDS -= FIELDS_WITHOUT_EFFECT


def read(rollout: ProxyRollout, fields: Any) -> Exchange:
    """Read a request for chat completions. Raises `WireError` or `UsageError`."""
    kept, dropped = split_fields(fields, _FIELDS, model=rollout.model)
    body, call = chat_call(kept, dropped)
    response_format = _ResponseFormat(rollout, body)
    return Exchange(
        call=call,
        is_streaming=body.stream,
        to_json=response_format.to_json,
        to_events=response_format.to_events,
    )


def openai_usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Return the token usage of one prompt and its replies."""
    prompt = max((reply.prompt_tokens for reply in replies), default=0)
    return usage_fields(prompt, sum(reply.completion_tokens for reply in replies))


def openai_events(parts: Sequence[dict[str, Any]]) -> list[bytes]:
    """Return the server-sent events of a response, with the final `[DONE]`."""
    return [*(b"data: " + msgspec.json.encode(part) + b"\n\n" for part in parts), b"data: [DONE]\n\n"]


class _ResponseFormat:
    def __init__(self, rollout: ProxyRollout, body: ChatRequest) -> None:
        self._rollout = rollout
        self._body = body
        self._is_tool_forced = isinstance(body.tool_choice, ToolChoice)
        self._head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": rollout.model}

    def to_json(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the complete response."""
        return {
            **self._head,
            "object": "chat.completion",
            **self._prompt_ids(replies),
            "choices": [self._choice(index, reply) for index, reply in enumerate(replies)],
            "usage": openai_usage(replies),
        }

    def to_events(self, replies: Sequence[Reply]) -> list[bytes]:
        """Return the response as server-sent events."""
        parts = []
        for index, reply in enumerate(replies):
            parts += self._chunks(index, reply)
        parts[0] |= self._prompt_ids(replies)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            for part in parts:
                part["usage"] = None
            parts.append(self._chunk([]) | {"usage": openai_usage(replies)})
        return openai_events(parts)

    def _split(self, reply: Reply) -> ReplyParts:
        return split_reply(reply, first_call_only=allows_one_call(self._body))

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        parts = self._split(reply)
        choice = {
            "index": index,
            "message": chat_message(parts.content, parts.reasoning, _tool_calls(parts)),
            "finish_reason": self._finish_reason(parts),
            "logprobs": self._logprobs(reply),
        }
        if self._body.return_token_ids and reply.tokens is not None:
            choice["token_ids"] = list(reply.tokens.token_ids)
        return choice

    def _chunks(self, index: int, reply: Reply) -> list[dict[str, Any]]:
        parts = self._split(reply)
        deltas_by_part = (
            chat_delta("", parts.reasoning),
            chat_delta(parts.content),
            chat_delta("", "", _tool_calls(parts)),
        )
        deltas = [{"role": "assistant", "content": ""}, *filter(None, deltas_by_part)]
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": delta, "finish_reason": None} for delta in deltas
        ]
        last: dict[str, Any] = {"index": index, "delta": {}, "finish_reason": self._finish_reason(parts)}
        last["logprobs"] = self._logprobs(reply)
        if self._body.return_token_ids and reply.tokens is not None:
            last["token_ids"] = list(reply.tokens.token_ids)
        return [self._chunk([choice]) for choice in (*choices, last)]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _finish_reason(self, parts: ReplyParts) -> str:
        # OpenAI's API also returns "stop" if the request names the function to call
        if parts.ending == "calls":
            return "stop" if self._is_tool_forced else "tool_calls"
        return parts.ending

    def _prompt_ids(self, replies: Sequence[Reply]) -> dict[str, Any]:
        tokens = replies[0].tokens
        is_requested = self._body.return_token_ids and tokens is not None
        return {"prompt_token_ids": list(tokens.prompt_ids)} if is_requested and tokens is not None else {}

    def _logprobs(self, reply: Reply) -> dict[str, Any] | None:
        logprobs = self._token_logprobs(reply) if self._body.logprobs else None
        if logprobs is None:
            return None
        return chat_logprobs((text, value, ()) for text, value in logprobs)

    def _token_logprobs(self, reply: Reply) -> Iterable[tuple[str, float]] | None:
        """Return text and log-prob of each token; None if the policy does not report them."""
        if reply.tokens is None:
            return reply.text_logprobs
        texts = map(self._rollout.token_text, reply.tokens.token_ids)
        return zip(texts, reply.tokens.logprobs, strict=True)


def _tool_calls(parts: ReplyParts) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in parts.calls
    ]
