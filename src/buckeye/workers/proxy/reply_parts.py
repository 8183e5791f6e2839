"""A reply in the parts that every dialect tells: reasoning, content, calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from buckeye.envs.base import Reply
from buckeye.envs.call_arguments import read_arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidCall:
    """One call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a reply says. `ending` is "calls" where it ends by asking for tools."""

    reasoning: str
    content: str
    calls: tuple[SaidCall, ...]
    ending: Literal["stop", "length", "calls"]


def said(reply: Reply, *, first_call_only: bool = False, objects_only: bool = False) -> Said:
    """The parts of a reply. Arguments are told as they were written, JSON or not: what to make of them is the
    agent's own rule. `objects_only` is for a dialect that has no place for others. Calls that it cannot tell,
    and those without a name, which agents take for their own mistake, are told as the text they were written
    as."""
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
    return Said(reasoning=reasoning, content=content, calls=tuple(calls), ending=ending)


def events(parts: Iterable[tuple[str, dict[str, Any]]]) -> list[bytes]:
    """Named server-sent events, each with its name as `type` too."""
    return [
        f"event: {name}\ndata: ".encode() + msgspec.json.encode({"type": name, **data}) + b"\n\n"
        for name, data in parts
    ]


def _call(call: Any) -> SaidCall:
    function = call["function"]
    return SaidCall(id=call["id"], name=function["name"], arguments=function["arguments"])


def _is_object(text: str) -> bool:
    try:
        read_arguments(text)
    except ValueError:
        return False
    return True


def _as_text(call: SaidCall) -> str:
    # as the chat renderer writes such calls back, so that the conversation can go on token for token
    name = msgspec.json.encode(call.name).decode()
    body = f'{{"name": {name}, "arguments": {call.arguments}}}' if call.name else call.arguments
    return f"<tool_call>\n{body}\n</tool_call>"
