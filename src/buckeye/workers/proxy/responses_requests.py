"""Requests of OpenAI's responses API, and their conversion to chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Text(msgspec.Struct, kw_only=True):
    """Text part of a message or an output. Images, audio and files are refused."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str = ""
    refusal: str = ""


Content = str | list[Text] | None


class MessageItem(msgspec.Struct, kw_only=True, tag="message"):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    """A tool call of the assistant."""

    call_id: str
    name: str
    arguments: str


class OutputItem(msgspec.Struct, kw_only=True, tag="function_call_output"):
    """Result of a tool call."""

    call_id: str
    output: Content


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """Reasoning of the assistant."""

    content: list[Text] | None = None
    summary: list[Text] | None = None


Item = MessageItem | CallItem | OutputItem | ReasoningItem


class FunctionTool(msgspec.Struct, kw_only=True):
    """A tool. Built-in tools of OpenAI's servers are refused."""

    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments."""
        return self.parameters or {"type": "object", "properties": {}}


class NamedTool(msgspec.Struct, kw_only=True):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST v1/responses."""

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.input and self.previous_response_id is None:
            raise ValueError("`input` is empty")


def with_types(value: Any) -> Any:
    """Return an `input` where every message has its `type`. OpenAI's API allows clients to omit it."""
    if not isinstance(value, list):
        return value
    return [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in value
    ]


def conversation(items: str | Iterable[Item]) -> list[dict[str, Any]]:
    """Return items as chat messages. Consecutive reasoning, text and calls become one assistant message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, OutputItem):
            messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": _join_text(item.output)}
            )
        elif isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _join_text(item.content)})
        else:
            _add_to_assistant(messages, item)
    return messages


def _add_to_assistant(messages: list[dict[str, Any]], item: MessageItem | CallItem | ReasoningItem) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    previous: Mapping[str, Any] = last or {}
    if isinstance(item, CallItem):
        continues = last is not None
    elif isinstance(item, MessageItem):
        continues = last is not None and not previous.get("content") and "tool_calls" not in previous
    else:
        continues = False  # reasoning begins a new message
    if last is None or not continues:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif isinstance(item, MessageItem):
        last["content"] = _join_text(item.content)
    else:
        last["reasoning_content"] = _join_text(item.content or item.summary)


def _join_text(content: Content) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or part.refusal for part in content)
