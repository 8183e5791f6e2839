"""Conversation of a rollout, for display and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec

from buckeye.monitor.rollouts import RecordedRollout, split_messages


@dataclass(frozen=True, slots=True)
class RecordedToolCall:
    """Tool call. `arguments` is the text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedMessage:
    """Message of a conversation.

    In the result of a tool call, `tool_call_id` is the id of the call.
    """

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[RecordedToolCall, ...] = ()
    tool_call_id: str | None = None


def conversation(rollout: RecordedRollout) -> list[RecordedMessage]:
    """Return the messages of a rollout.

    If the rollout has no recorded messages, split its texts into messages.
    """
    if rollout.messages:
        return [parse_message(message) for message in rollout.messages]
    return [
        RecordedMessage(role=role or "text", text=message)
        for text in rollout.text
        for role, message in split_messages(text)
    ]


def parse_message(given: Mapping[str, Any]) -> RecordedMessage:
    """Convert a message in OpenAI's format, as environments write it.

    Any part may be missing or of another type. The text may begin with reasoning in `<think>` tags.
    """
    text, reasoning = (
        content_text(given.get("content")),
        given.get("reasoning_content") or given.get("reasoning"),
    )
    begin, end = "<think>", "</think>"
    if not reasoning and text.lstrip().startswith(begin) and end in text:
        reasoning, _, text = text.lstrip().removeprefix(begin).partition(end)
    return RecordedMessage(
        role=str(given.get("role") or "text"),
        text=text,
        reasoning=content_text(reasoning),
        calls=tuple(_calls(given.get("tool_calls"))),
        tool_call_id=str(given["tool_call_id"]) if given.get("tool_call_id") else None,
    )


def _calls(given: Any) -> Iterator[RecordedToolCall]:
    for call in given if isinstance(given, list) else ():
        if isinstance(call, dict):
            function = call["function"] if isinstance(call.get("function"), dict) else call
            arguments = content_text(function.get("arguments"))
            yield RecordedToolCall(str(call.get("id") or ""), str(function.get("name") or ""), arguments)


def content_text(content: Any) -> str:
    """Return a message's content as text.

    A part without text becomes its type, such as `[image_url]`. Any other value becomes JSON.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list | tuple):
        return "\n".join(map(_part, content))
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return str(content["text"])
    return msgspec.json.encode(content).decode()


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the messages before the first reply."""
    prompt = takewhile(lambda message: message.get("role") != "assistant", messages)
    return "\n".join(content_text(message.get("content")) for message in prompt)


def _part(given: Any) -> str:
    if isinstance(given, dict) and not isinstance(given.get("text"), str):
        return f"[{given.get('type', 'part')}]"
    return content_text(given)
