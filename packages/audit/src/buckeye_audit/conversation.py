"""The conversation of a rollout: what people read of it, and what other tools are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from buckeye.monitor.rollouts import PlayedRollout, messages_in


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` are text, as the model wrote them."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message of a conversation; `answers` is the id of the call whose result it is."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    answers: str | None = None


def conversation(rollout: PlayedRollout) -> list[Message]:
    """The messages of a rollout; where none are recorded, what was seen and written."""
    if rollout.messages:
        return [_message(message) for message in rollout.messages]
    return [
        Message(role=role or "text", text=said) for text in rollout.text for role, said in messages_in(text)
    ]


def _message(given: Mapping[str, Any]) -> Message:
    """From a message of OpenAI's API, as environments write them: any part may be missing or of another
    kind."""
    reasoning = given.get("reasoning_content") or given.get("reasoning") or ""
    return Message(
        role=str(given.get("role") or "text"),
        text=as_text(given.get("content")),
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
    """The text of a message's content: text, parts, or anything else as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    return msgspec.json.encode(content).decode()
