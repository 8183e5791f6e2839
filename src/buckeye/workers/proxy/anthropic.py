"""Anthropic's messages route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from buckeye.chat.openai_api import convert_request
from buckeye.envs.base import Reply
from buckeye.envs.call_arguments import read_arguments
from buckeye.workers.proxy.anthropic_requests import MessagesRequest, chat_fields
from buckeye.workers.proxy.exchange import Exchange, allows_one_call, chat_call, new_id
from buckeye.workers.proxy.reply_parts import ReplyParts, encode_events, split_reply
from buckeye.workers.proxy.request_fields import field_names, split_fields
from buckeye.workers.proxy.rollout import ProxyRollout

_FIELDS = field_names(MessagesRequest)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}


def read(rollout: ProxyRollout, fields: Any) -> Exchange:
    """Read a request for a message. Raises `WireError` or `UsageError`."""
    kept, dropped = split_fields(fields, _FIELDS, model=rollout.model)
    body = convert_request(kept, MessagesRequest)
    request, call = chat_call(chat_fields(body), dropped)

    def to_json(replies: Sequence[Reply]) -> dict[str, Any]:
        (reply,) = replies
        parts = split_reply(reply, first_call_only=allows_one_call(request), objects_only=True)
        return _message(rollout.model, reply, parts)

    def to_events(replies: Sequence[Reply]) -> list[bytes]:
        return encode_events(_stream_events(to_json(replies)))

    return Exchange(call=call, is_streaming=body.stream, to_json=to_json, to_events=to_events)


def _message(model: str, reply: Reply, parts: ReplyParts) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if parts.reasoning:
        content.append({"type": "thinking", "thinking": parts.reasoning, "signature": ""})
    if parts.content:
        content.append({"type": "text", "text": parts.content})
    for call in parts.calls:
        arguments = read_arguments(call.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    stop_reason = _STOP_REASONS[parts.ending]
    if reply.stopped_by is not None and parts.ending == "stop":
        stop_reason = "stop_sequence"
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": reply.stopped_by if stop_reason == "stop_sequence" else None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def _stream_events(final: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    usage = {**final["usage"], "output_tokens": 0}
    initial = {**final, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield "message_start", {"message": initial}
    for index, block in enumerate(final["content"]):
        empty, deltas = _initial_and_deltas(block)
        yield "content_block_start", {"index": index, "content_block": empty}
        for delta in deltas:
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ending = {"stop_reason": final["stop_reason"], "stop_sequence": final["stop_sequence"]}
    yield "message_delta", {"delta": ending, "usage": {"output_tokens": final["usage"]["output_tokens"]}}
    yield "message_stop", {}


def _initial_and_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a content block in its initial state, and the deltas that complete it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {**block, "thinking": ""}, deltas
    arguments_json = msgspec.json.encode(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments_json}]
