"""Conversation of a rollout, for display and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from buckeye.monitor.rollouts import PlayedRollout, messages_in


@dataclass(frozen=True, slots=True)
class Call:
    """Tool call; `arguments` are the text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Message of a conversation; `answers` is the id of the call that it is the result of."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    answers: str | None = None


def conversation(rollout: PlayedRollout) -> list[Message]:
    """Return the messages of a rollout. If none are recorded, split its texts into messages."""
    if rollout.messages:
        return [message_of(message) for message in rollout.messages]
    return [
        Message(role=role or "text", text=said) for text in rollout.text for role, said in messages_in(text)
    ]


def message_of(given: Mapping[str, Any]) -> Message:
    """Convert a message of OpenAI's API, as environments write it: any part may be missing or of another
    type. Reasoning may precede the text.
    """
    text, reasoning = as_text(given.get("content")), given.get("reasoning_content") or given.get("reasoning")
    begin, end = "<think>", "</think>"
    if not reasoning and text.lstrip().startswith(begin) and end in text:
        reasoning, _, text = text.lstrip().removeprefix(begin).partition(end)
    return Message(
        role=str(given.get("role") or "text"),
        text=text,
        reasoning=as_text(reasoning),
        calls=tuple(_calls(given.get("tool_calls"))),
        answers=str(given["tool_call_id"]) if given.get("tool_call_id") else None,
    )


def _calls(given: Any) -> Iterator[Call]:
    for call in given if isinstance(given, list) else ():
        if isinstance(call, dict):
            function = call["function"] if isinstance(call.get("function"), dict) else call
            arguments = as_text(function.get("arguments"))
            yield Call(str(call.get("id") or ""), str(function.get("name") or ""), arguments)


def as_text(content: Any) -> str:
    """Return a message's content as text. Parts of other kinds appear by name, any other value as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n".join(map(_part, content))
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return str(content["text"])
    return msgspec.json.encode(content).decode()


def _part(given: Any) -> str:
    if isinstance(given, dict) and not isinstance(given.get("text"), str):
        return f"[{given.get('type', 'part')}]"
    return as_text(given)
