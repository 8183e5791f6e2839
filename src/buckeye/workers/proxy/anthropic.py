"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from buckeye.chat.messages import tools_problem
from buckeye.chat.openai_api import convert
from buckeye.envs.base import CallOptions, Reply
from buckeye.workers.proxy.errors import WireError
from buckeye.workers.proxy.exchange import Exchange, new_id
from buckeye.workers.proxy.reply_parts import Said, events, said
from buckeye.workers.proxy.rollout import Call, Rollout
from buckeye.workers.proxy.settings import fields_of, split

# The requests of Anthropic's messages API, and the chats that their blocks are.


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """Text of anybody. Pictures and documents are refused."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """What the assistant has thought."""

    thinking: str


class RedactedBlock(msgspec.Struct, kw_only=True, tag="redacted_thinking"):
    """What nobody but Anthropic can read; it is left out."""


class UseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call that the assistant has made."""

    id: str
    name: str
    input: dict[str, Any]


class ResultBlock(msgspec.Struct, kw_only=True, tag="tool_result"):
    """What a call has brought."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None


Block = TextBlock | ThinkingBlock | RedactedBlock | UseBlock | ResultBlock


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool. Tools that Anthropic's servers know by themselves are refused."""

    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class Choice(msgspec.Struct, kw_only=True):
    """Whether a tool has to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesRequest(msgspec.Struct, kw_only=True):
    """POST v1/messages."""

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
            raise ValueError("`tool_choice` is any and there are no `tools`")
        if choice is not None and choice.type == "tool" and choice.name not in names:
            raise ValueError(f"`tool_choice` is {choice.name!r}, which is none of `tools`")

    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is shown, in the form of chats. Raises `WireError`."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        tools = [_chat_tool(tool) for tool in self.tools or ()]
        if problem := tools_problem(tools):
            raise WireError(400, f"Bad request: {problem}")
        return tools

    @property
    def must_call(self) -> bool:
        """Whether the reply has to be a call."""
        return self.tool_choice is not None and self.tool_choice.type in ("any", "tool")

    def forced_tool(self) -> str | None:
        """The tool that must be called; None where the model may choose one."""
        if self.tool_choice is not None and self.tool_choice.type == "tool":
            return self.tool_choice.name
        return self.tools[0].name if self.tools is not None and len(self.tools) == 1 else None


def chat_messages(body: MessagesRequest) -> list[dict[str, Any]]:
    """The chat that a request is."""
    messages: list[dict[str, Any]] = []
    if system := _text(body.system):
        messages.append({"role": "system", "content": system})
    for message in body.messages:
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_said(message.content))
        else:
            messages += _asked(message.content)
    return messages


def _said(blocks: Sequence[Block]) -> dict[str, Any]:
    """An assistant's blocks as one message."""
    message: dict[str, Any] = {"role": "assistant", "content": _text(_texts(blocks))}
    thinking = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    calls = [_call(block) for block in blocks if isinstance(block, UseBlock)]
    if calls:
        message["tool_calls"] = calls
    return message


def _asked(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """A user's blocks: the results of calls, and then what the user says."""
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in blocks
        if isinstance(block, ResultBlock)
    ]
    texts = _texts(blocks)
    if texts or not messages:
        messages.append({"role": "user", "content": _text(texts)})
    return messages


def _texts(blocks: Sequence[Block]) -> list[TextBlock]:
    return [block for block in blocks if isinstance(block, TextBlock)]


def _text(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _call(block: UseBlock) -> dict[str, Any]:
    # spaced as the renderer writes what it has read: a template without tools repeats it as text
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _chat_tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


# Anthropic's messages.

_FIELDS = fields_of(MessagesRequest)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}


def read(rollout: Rollout, fields: Any) -> Exchange:
    """A request for a message. Raises `WireError` or `UsageError`."""
    kept, dropped = split(fields, _FIELDS, model=rollout.model)
    body = convert(kept, MessagesRequest)
    call = Call(
        messages=chat_messages(body),
        tools=body.offered_tools(),
        options=CallOptions(
            max_tokens=body.max_tokens,
            stop=tuple(stop for stop in body.stop_sequences or () if stop),
            must_call=body.must_call,
            tool=body.forced_tool() if body.must_call else None,
        ),
        dropped=dropped,
    )
    choice = body.tool_choice
    first_call_only = choice is not None and (choice.disable_parallel_tool_use or choice.type == "tool")

    def whole(replies: Sequence[Reply]) -> dict[str, Any]:
        (reply,) = replies
        parts = said(reply, first_call_only=first_call_only, objects_only=True)
        return _message(rollout.model, reply, parts)

    def stream(replies: Sequence[Reply]) -> list[bytes]:
        return events(_told(whole(replies)))

    return Exchange(call=call, streams=body.stream, whole=whole, stream=stream)


def _message(model: str, reply: Reply, parts: Said) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if parts.reasoning:
        content.append({"type": "thinking", "thinking": parts.reasoning, "signature": ""})
    if parts.content:
        content.append({"type": "text", "text": parts.content})
    for call in parts.calls:
        arguments = msgspec.json.decode(call.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    stop_reason = _STOP_REASONS[parts.ending]
    if reply.stopped_by is not None and parts.ending == "stop":
        stop_reason = "stop_sequence"
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": reply.stopped_by if stop_reason == "stop_sequence" else None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def _told(final: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    usage = {**final["usage"], "output_tokens": 0}
    begun = {**final, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield "message_start", {"message": begun}
    for index, block in enumerate(final["content"]):
        empty, deltas = _grown(block)
        yield "content_block_start", {"index": index, "content_block": empty}
        for delta in deltas:
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ending = {"stop_reason": final["stop_reason"], "stop_sequence": final["stop_sequence"]}
    yield "message_delta", {"delta": ending, "usage": {"output_tokens": final["usage"]["output_tokens"]}}
    yield "message_stop", {}


def _grown(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what it grows by."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {**block, "thinking": ""}, deltas
    written = msgspec.json.encode(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]
