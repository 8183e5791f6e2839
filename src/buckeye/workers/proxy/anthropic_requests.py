"""Requests of Anthropic's messages API, and their conversion to chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from buckeye.workers.proxy.exchange import chat_tool, named_tool_choice


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """Text of a user or an assistant. Images and documents are refused."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """Reasoning of the assistant."""

    thinking: str


class RedactedBlock(msgspec.Struct, kw_only=True, tag="redacted_thinking"):
    """Encrypted reasoning, which only Anthropic can read. The proxy drops it."""


class UseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A tool call of the assistant."""

    id: str
    name: str
    input: dict[str, Any]


class ResultBlock(msgspec.Struct, kw_only=True, tag="tool_result"):
    """Result of a tool call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None


Block = TextBlock | ThinkingBlock | RedactedBlock | UseBlock | ResultBlock


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool. Built-in tools of Anthropic's servers are refused."""

    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class Choice(msgspec.Struct, kw_only=True):
    """Value of `tool_choice`: tool calls are optional, required, forbidden, or required of one tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Body of POST v1/messages."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    system: str | list[TextBlock] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=64)] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: Choice | None = None
    stream: bool = False


def chat_fields(body: MessagesRequest) -> dict[str, Any]:
    """Return a request as fields of OpenAI's chat completions."""
    fields: dict[str, Any] = {
        "messages": _chat_messages(body),
        "tools": [chat_tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()],
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
    }
    if (choice := body.tool_choice) is not None:
        kinds = {"any": "required", "tool": named_tool_choice(choice.name)}
        fields["tool_choice"] = kinds.get(choice.type, choice.type)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _chat_messages(body: MessagesRequest) -> list[dict[str, Any]]:
    """Return a request's conversation as chat messages."""
    messages: list[dict[str, Any]] = []
    if system := _join_text(body.system):
        messages.append({"role": "system", "content": system})
    for message in body.messages:
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant_message(message.content))
        else:
            messages += _user_messages(message.content)
    return messages


def _assistant_message(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return an assistant's blocks as one message."""
    message: dict[str, Any] = {"role": "assistant", "content": _join_text(_text_blocks(blocks))}
    thinking = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    calls = [_tool_call(block) for block in blocks if isinstance(block, UseBlock)]
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Return a user's blocks as messages: tool results first, then the user's text."""
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _join_text(block.content)}
        for block in blocks
        if isinstance(block, ResultBlock)
    ]
    texts = _text_blocks(blocks)
    if texts or not messages:
        messages.append({"role": "user", "content": _join_text(texts)})
    return messages


def _text_blocks(blocks: Sequence[Block]) -> list[TextBlock]:
    return [block for block in blocks if isinstance(block, TextBlock)]


def _join_text(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _tool_call(block: UseBlock) -> dict[str, Any]:
    # same spacing as the chat renderer, which writes calls as text if a chat template does not support tools
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
