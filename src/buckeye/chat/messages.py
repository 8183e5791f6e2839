"""Validate chat messages and tools of OpenAI's API before a chat template renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text part of a message's content. Other parts, such as images and audio, are invalid."""

    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Called function. `arguments` is JSON text, or the model's text if this text is not valid JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool call of the assistant. `index` has no effect, but some clients copy it from stream events."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Chat message.

    Other servers add empty fields to their replies, such as `refusal`. This class accepts these fields,
    because clients send a reply back in the next request.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Name of `reasoning_content` in vLLM. Both fields have the same text."""
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    def to_template_message(self) -> dict[str, Any]:
        """Return the message for a chat template. Join the content to one text, and omit empty fields."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        # `developer` is OpenAI's newer name for `system`, but few templates support this role
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content or "",
        }
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        plain |= {name: value for name, value in optional.items() if value is not None}
        if self.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in self.tool_calls]
        return plain


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Name, description and JSON Schema of the arguments of a tool.

    The model reads the schema, but the server does not enforce it. `strict` has no effect.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool that the model may call."""

    type: Literal["function"]
    function: Function

    def __post_init__(self) -> None:
        if not self.function.name:
            raise ValueError("a tool must have a name")


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Name of the tool in a `ToolChoice`."""

    name: str


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class _Tools(msgspec.Struct):
    tools: list[Tool]


def tools_problem(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first problem of a list of tools as text, or None if the list is valid."""
    try:
        checked = msgspec.convert({"tools": list(tools)}, _Tools)
    except msgspec.ValidationError as error:
        return str(error)
    names = [tool.function.name for tool in checked.tools]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    return f"`tools` has two tools named {duplicate!r}" if duplicate else None


def _plain_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": call.type, "function": function}
