"""Requests of Anthropic's messages API, and their conversion to chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from buckeye.chat.messages import tools_problem
from buckeye.workers.proxy.errors import WireError


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """Text of a user or an assistant. Images and documents are refused."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """Reasoning of the assistant."""

    thinking: str


class RedactedBlock(msgspec.Struct, kw_only=True, tag="redacted_thinking"):
    """Encrypted reasoning, which only Anthropic can read. It is dropped."""


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
    """Rule for tool calls: optional, required, or a certain tool."""

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

    def __post_init__(self) -> None:
        choice, names = self.tool_choice, [tool.name for tool in self.tools or ()]
        if choice is not None and choice.type == "any" and not names:
            raise ValueError("`tool_choice` is `any`, but `tools` is empty")
        if choice is not None and choice.type == "tool" and choice.name not in names:
            raise ValueError(f"`tool_choice` is {choice.name!r}, which is not in `tools`")

    def offered_tools(self) -> list[dict[str, Any]]:
        """Return the tools for the model, in the format of chats. Raises `WireError`."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        tools = [_chat_tool(tool) for tool in self.tools or ()]
        if problem := tools_problem(tools):
            raise WireError(400, f"Bad request: {problem}")
        return tools

    @property
    def must_call(self) -> bool:
        """True if the reply has to be a tool call."""
        return self.tool_choice is not None and self.tool_choice.type in ("any", "tool")

    def forced_tool(self) -> str | None:
        """Return the tool that must be called; None if the model may choose."""
        if self.tool_choice is not None and self.tool_choice.type == "tool":
            return self.tool_choice.name
        return self.tools[0].name if self.tools is not None and len(self.tools) == 1 else None


def chat_messages(body: MessagesRequest) -> list[dict[str, Any]]:
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
    # spacing of the chat renderer, because a template without tools repeats the call as text
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _chat_tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}
