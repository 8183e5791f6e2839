"""OpenAI's responses route: a response is a list of items, and the server stores the conversation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from buckeye.chat.openai_api import convert_request
from buckeye.envs.base import Message, Reply
from buckeye.workers.proxy.errors import WireError
from buckeye.workers.proxy.exchange import (
    Exchange,
    allows_one_call,
    chat_call,
    chat_tool,
    named_tool_choice,
    new_id,
)
from buckeye.workers.proxy.reply_parts import ReplyParts, encode_events, split_reply
from buckeye.workers.proxy.request_fields import field_names, split_fields
from buckeye.workers.proxy.responses_requests import NamedTool, ResponsesRequest, conversation, with_types
from buckeye.workers.proxy.rollout import ProxyRollout

_FIELDS = field_names(ResponsesRequest)


def read(rollout: ProxyRollout, fields: Any) -> Exchange:
    """Read a request for a response. Raises `WireError` or `UsageError`."""
    kept, dropped = split_fields(fields, _FIELDS, model=rollout.model)
    kept["input"] = with_types(kept.get("input"))
    body = convert_request(kept, ResponsesRequest)
    messages = [*_stored_messages(rollout, body.previous_response_id), *conversation(body.input)]
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    request, call = chat_call(
        {
            "messages": [*system, *messages],
            "tools": [chat_tool(tool.name, tool.description, tool.schema) for tool in body.tools or ()],
            "tool_choice": named_tool_choice(body.tool_choice.name)
            if isinstance(body.tool_choice, NamedTool)
            else body.tool_choice,
            "parallel_tool_calls": body.parallel_tool_calls,
            "max_tokens": body.max_output_tokens,
        },
        dropped,
    )
    response_format = _ResponseFormat(rollout, body, messages, first_call_only=allows_one_call(request))
    return Exchange(
        call=call,
        is_streaming=body.stream,
        to_json=response_format.to_json,
        to_events=response_format.to_events,
    )


def _stored_messages(rollout: ProxyRollout, response_id: str | None) -> Sequence[Message]:
    if response_id is None:
        return ()
    if response_id not in rollout.responses:
        raise WireError(
            404,
            f"`previous_response_id` {response_id!r} is not a response of this rollout.",
            code="not_found",
        )
    return rollout.responses[response_id]


class _ResponseFormat:
    def __init__(
        self, rollout: ProxyRollout, body: ResponsesRequest, messages: list[Message], *, first_call_only: bool
    ) -> None:
        self._rollout = rollout
        self._body = body
        self._messages = messages
        self._first_call_only = first_call_only
        self._id = new_id("resp_")

    def to_json(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the complete response, and store its conversation."""
        (reply,) = replies
        parts = split_reply(reply, first_call_only=self._first_call_only)
        self._rollout.responses[self._id] = [*self._messages, _stored_reply(reply.message, parts)]
        return self._response(reply, parts, _items(parts))

    def to_events(self, replies: Sequence[Reply]) -> list[bytes]:
        """Return the response as server-sent events."""
        final = self.to_json(replies)
        events = self._stream_events(final)
        return encode_events(
            (name, {"sequence_number": number, **data}) for number, (name, data) in enumerate(events)
        )

    def _response(self, reply: Reply, parts: ReplyParts, items: list[dict[str, Any]]) -> dict[str, Any]:
        body, cut = self._body, parts.ending == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": self._rollout.model,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": body.instructions,
            "metadata": {},
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "temperature": None,
            "top_p": None,
            "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
            "tools": msgspec.to_builtins(body.tools or ()),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
        }

    def _stream_events(self, final: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        initial = {**final, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield "response.created", {"response": initial}
        yield "response.in_progress", {"response": initial}
        for index, item in enumerate(final["output"]):
            yield from _item_events(index, item)
        yield f"response.{final['status']}", {"response": final}


def _stored_reply(message: Message, parts: ReplyParts) -> Message:
    """Return the reply for the stored conversation, without calls that the client did not receive."""
    calls = message.get("tool_calls") or ()
    return message if len(parts.calls) in (0, len(calls)) else {**message, "tool_calls": calls[:1]}


def _items(parts: ReplyParts) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    status = "incomplete" if parts.ending == "length" else "completed"
    if parts.reasoning:
        content = [{"type": "reasoning_text", "text": parts.reasoning}]
        items.append({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": content})
    if parts.content or not parts.calls:
        text = {"type": "output_text", "text": parts.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": new_id("msg_"),
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    for call in parts.calls:
        items.append(
            {
                "type": "function_call",
                "id": new_id("fc_"),
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return items


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "function_call":
        yield _item_added(index, {**item, "arguments": "", "status": "in_progress"})
        kind = "response.function_call_arguments"
        yield f"{kind}.delta", {**at, "delta": item["arguments"]}
        yield f"{kind}.done", {**at, "name": item["name"], "arguments": item["arguments"]}
    else:
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        part = item["content"][0]
        inside = {**at, "content_index": 0}
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        yield _item_added(index, {**item, "content": []} | ({"status": "in_progress"} if more else {}))
        yield "response.content_part.added", {**inside, "part": {**part, "text": ""}}
        if part["text"]:
            yield f"response.{kind}.delta", {**inside, "delta": part["text"], **more}
        yield f"response.{kind}.done", {**inside, "text": part["text"], **more}
        yield "response.content_part.done", {**inside, "part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _item_added(index: int, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "response.output_item.added", {"output_index": index, "item": item}
