"""Parts of a reply that every API has: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from buckeye.envs.base import Reply
from buckeye.envs.call_arguments import read_arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyCall:
    """One tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyParts:
    """Parts of a reply. `ending` is "calls" if the reply ends with tool calls."""

    reasoning: str
    content: str
    calls: tuple[ReplyCall, ...]
    ending: Literal["stop", "length", "calls"]


def split_reply(reply: Reply, *, first_call_only: bool = False, objects_only: bool = False) -> ReplyParts:
    """Return the parts of a reply.

    The arguments of calls stay unchanged, even if they are not JSON. `objects_only` is for an API whose
    arguments must be JSON objects. If a call has other arguments or no name, all calls of the reply become
    text of the content, because agents fail on invalid calls.
    """
    message = reply.message
    reasoning, content = message.get("reasoning_content") or "", message.get("content") or ""
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if not all(call.name and (not objects_only or _is_object(call.arguments)) for call in calls):
        content = "\n".join([*([content] if content else []), *(_as_text(call) for call in calls)])
        calls = []
    calls = calls[:1] if first_call_only else calls
    ending: Literal["stop", "length", "calls"] = "length" if reply.finish_reason == "length" else "stop"
    if calls and ending == "stop":
        ending = "calls"
    return ReplyParts(reasoning=reasoning, content=content, calls=tuple(calls), ending=ending)


def encode_events(parts: Iterable[tuple[str, dict[str, Any]]]) -> list[bytes]:
    """Return server-sent events from pairs of name and data.

    The data of an event repeats its name as `type`.
    """
    return [
        f"event: {name}\ndata: ".encode() + msgspec.json.encode({"type": name, **data}) + b"\n\n"
        for name, data in parts
    ]


def _call(call: Any) -> ReplyCall:
    function = call["function"]
    return ReplyCall(id=call["id"], name=function["name"], arguments=function["arguments"])


def _is_object(text: str) -> bool:
    try:
        read_arguments(text)
    except ValueError:
        return False
    return True


def _as_text(call: ReplyCall) -> str:
    # same text as the chat renderer writes, so that the next prompt begins with the token ids of this reply
    name = msgspec.json.encode(call.name).decode()
    body = f'{{"name": {name}, "arguments": {call.arguments}}}' if call.name else call.arguments
    return f"<tool_call>\n{body}\n</tool_call>"
