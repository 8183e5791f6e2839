"""Parts of a parsed reply: reasoning, content and tool calls. No reply raises an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
    """Tool call: `name`, and `arguments` as JSON text.

    A call that cannot be parsed has an empty name, and its text as arguments.
    """

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedMessage:
    """Parsed reply. `reasoning` is None if the reply has no separate reasoning."""

    content: str
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()


def split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    """Split a reply into reasoning and content.

    Set `opened` if the prompt ends with `<think>`. Without `</think>`, the whole text is reasoning.
    """
    body = text.lstrip()
    if body.startswith("<think>"):
        body = body.removeprefix("<think>")
    elif not opened:
        return None, text
    reasoning, _, content = body.partition("</think>")
    return reasoning.strip("\n"), content.lstrip("\n")


def make_call(name: Any, arguments: Any, *, raw: str) -> ParsedCall:
    """Return a call with `name` and `arguments`.

    If they are not valid, return an unreadable call with the text `raw` as arguments.
    """
    unreadable = ParsedCall(name="", arguments=raw.strip())
    if not isinstance(name, str) or not name:
        return unreadable
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    try:
        (name + text).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which tokenizers cannot encode
        return unreadable
    return ParsedCall(name=name, arguments=text)


def to_openai_message(parsed: ParsedMessage, *, first_call: int) -> dict[str, Any]:
    """Return the assistant message in OpenAI's format.

    The ids of calls are numbered from `first_call`, so that they are unique in a conversation. An id such as
    call00012 has nine characters, because some templates accept no other length.
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": f"call{number:05d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.calls, first_call)
        ]
    return message


def count_calls(messages: Sequence[Any]) -> int:
    """Return the number of calls in a conversation."""
    return sum(len(message.get("tool_calls") or ()) for message in messages)
