"""Reading what a model wrote: reasoning, content and tool calls. Nothing it can write is an error here."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call: `name` and `arguments`, JSON text. One that cannot be read has an empty name, and what was
    written as its arguments."""

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """A reply in its parts. `reasoning` is None where the model did not think apart from its content."""

    content: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()


def split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    """Reasoning and the rest. `opened`: the prompt has begun the reasoning. Unclosed, all is reasoning."""
    body = text.lstrip()
    if body.startswith("<think>"):
        body = body.removeprefix("<think>")
    elif not opened:
        return None, text
    reasoning, _, content = body.partition("</think>")
    return reasoning.strip("\n"), content.lstrip("\n")


def tagged_calls(text: str) -> Parsed:
    """Calls as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`; the rest is content."""
    calls = tuple(read_call(match[1]) for match in _BLOCK.finditer(text))
    return Parsed(content=_BLOCK.sub("", text).strip() if calls else text, calls=calls)


def bare_call(text: str) -> Parsed:
    """A reply that is one JSON object with a name is a call; any other is content."""
    call = read_call(text.strip().removeprefix(_PYTHON_TAG))
    return Parsed(content="", calls=(call,)) if call.name else Parsed(content=text)


def read_call(text: str) -> Call:
    """A call written as JSON with a `name` and `arguments` (or `parameters`)."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Call(name="", arguments=text.strip())
    if not isinstance(value, dict):
        return Call(name="", arguments=text.strip())
    arguments = value.get("arguments", value.get("parameters", {}))
    return make_call(value.get("name"), arguments, raw=text)


def make_call(name: Any, arguments: Any, *, raw: str) -> Call:
    """A call of parts that were read; `raw` is what was written, kept if they are not a call after all."""
    unreadable = Call(name="", arguments=raw.strip())
    if not isinstance(name, str) or not name:
        return unreadable
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    try:
        (name + text).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which no tokenizer can write
        return unreadable
    return Call(name=name, arguments=text)


def message_of(parsed: Parsed, *, first_call: int) -> dict[str, Any]:
    """The assistant message in the OpenAI form. Calls are numbered from `first_call` on within a
    conversation; nine letters and digits, since some templates accept no other id."""
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
    """How many calls a conversation has had."""
    return sum(len(message.get("tool_calls") or ()) for message in messages)
