"""OpenAI's responses: a reply as items, and a conversation that the server remembers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from buckeye.chat.messages import tools_problem
from buckeye.chat.openai_api import convert
from buckeye.envs.base import CallOptions, Message, Reply
from buckeye.workers.proxy.errors import WireError
from buckeye.workers.proxy.exchange import Exchange, new_id
from buckeye.workers.proxy.reply_parts import Said, events, said
from buckeye.workers.proxy.rollout import Call, Rollout
from buckeye.workers.proxy.settings import fields_of, split

# The requests of OpenAI's responses API, and the conversations that their items are.


class Text(msgspec.Struct, kw_only=True):
    """One part of a content. Pictures, sounds and files are refused."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str = ""
    refusal: str = ""


Content = str | list[Text] | None


class MessageItem(msgspec.Struct, kw_only=True, tag="message"):
    """A message of anybody."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    """A call that the assistant has made."""

    call_id: str
    name: str
    arguments: str


class OutputItem(msgspec.Struct, kw_only=True, tag="function_call_output"):
    """What a call has brought."""

    call_id: str
    output: Content


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """What the assistant has thought."""

    content: list[Text] | None = None
    summary: list[Text] | None = None


Item = MessageItem | CallItem | OutputItem | ReasoningItem


class FunctionTool(msgspec.Struct, kw_only=True):
    """A tool. Tools that OpenAI's servers run themselves are refused."""

    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, kw_only=True):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST v1/responses."""

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
        names = [tool.name for tool in self.tools or ()]
        if self.tool_choice == "required" and not names:
            raise ValueError("`tool_choice` is required and there are no `tools`")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.name not in names:
            raise ValueError(f"`tool_choice` is {self.tool_choice.name!r}, which is none of `tools`")
        if not self.input and self.previous_response_id is None:
            raise ValueError("`input` is empty")

    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is shown, in the form of chats. Raises `WireError`."""
        if self.tool_choice == "none":
            return []
        tools = [_chat_tool(tool) for tool in self.tools or ()]
        if problem := tools_problem(tools):
            raise WireError(400, f"Bad request: {problem}")
        return tools

    def forced_tool(self) -> str | None:
        """The tool that must be called; None where the model may choose one."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.name
        return self.tools[0].name if self.tools is not None and len(self.tools) == 1 else None

    @property
    def must_call(self) -> bool:
        """Whether the reply has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


def with_types(value: Any) -> Any:
    """An `input` in which messages have their type: OpenAI's API lets it be left out."""
    if not isinstance(value, list):
        return value
    return [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in value
    ]


def conversation(items: str | Iterable[Item]) -> list[dict[str, Any]]:
    """The chat that items are: what an assistant thinks, says and calls one after another is one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, OutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content)})
        else:
            _add_said(messages, item)
    return messages


def _add_said(messages: list[dict[str, Any]], item: MessageItem | CallItem | ReasoningItem) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    begun: Mapping[str, Any] = last or {}
    if isinstance(item, CallItem):
        fits = last is not None
    elif isinstance(item, MessageItem):
        fits = last is not None and not begun.get("content") and "tool_calls" not in begun
    else:
        fits = False  # thinking comes first
    if last is None or not fits:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif isinstance(item, MessageItem):
        last["content"] = _text(item.content)
    else:
        last["reasoning_content"] = _text(item.content or item.summary)


def _text(content: Content) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or part.refusal for part in content)


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


# OpenAI's responses: a reply as items, and a conversation that the server remembers.

_FIELDS = fields_of(ResponsesRequest)


def read(rollout: Rollout, fields: Any) -> Exchange:
    """A request for a response. Raises `WireError` or `UsageError`."""
    kept, dropped = split(fields, _FIELDS, model=rollout.model)
    kept["input"] = with_types(kept.get("input"))
    body = convert(kept, ResponsesRequest)
    messages = [*_before(rollout, body.previous_response_id), *conversation(body.input)]
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    call = Call(
        messages=[*system, *messages],
        tools=body.offered_tools(),
        options=CallOptions(
            max_tokens=body.max_output_tokens,
            must_call=body.must_call,
            tool=body.forced_tool() if body.must_call else None,
        ),
        dropped=dropped,
    )
    answer = _Answer(rollout, body, messages)
    return Exchange(call=call, streams=body.stream, whole=answer.whole, stream=answer.stream)


def _before(rollout: Rollout, response_id: str | None) -> Sequence[Message]:
    if response_id is None:
        return ()
    if response_id not in rollout.responses:
        raise WireError(
            404, f"`previous_response_id` {response_id!r} is no response of this rollout.", code="not_found"
        )
    return rollout.responses[response_id]


class _Answer:
    def __init__(self, rollout: Rollout, body: ResponsesRequest, messages: list[Message]) -> None:
        self._rollout = rollout
        self._body = body
        self._messages = messages
        self._first_call_only = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
        self._id = new_id("resp_")

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The answer in one piece."""
        (reply,) = replies
        parts = said(reply, first_call_only=self._first_call_only)
        self._rollout.responses[self._id] = [*self._messages, _kept(reply.message, parts)]
        return self._response(reply, parts, _items(parts))

    def stream(self, replies: Sequence[Reply]) -> list[bytes]:
        """The answer in parts."""
        final = self.whole(replies)
        told = self._told(final)
        return events((name, {"sequence_number": number, **data}) for number, (name, data) in enumerate(told))

    def _response(self, reply: Reply, parts: Said, items: list[dict[str, Any]]) -> dict[str, Any]:
        body, cut = self._body, parts.ending == "length"
        choice = body.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": self._rollout.model,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": body.instructions,
            "metadata": {},
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "temperature": None,
            "top_p": None,
            "tool_choice": {"type": "function", "name": choice.name}
            if isinstance(choice, NamedTool)
            else choice or "auto",
            "tools": [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": tool.strict,
                }
                for tool in body.tools or ()
            ],
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
        }

    def _told(self, final: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        begun = {**final, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(final["output"]):
            yield from _item_events(index, item)
        yield f"response.{final['status']}", {"response": final}


def _kept(message: Message, parts: Said) -> Message:
    """The reply as the conversation goes on with it: without the calls that were not told."""
    calls = message.get("tool_calls") or ()
    return message if len(parts.calls) in (0, len(calls)) else {**message, "tool_calls": calls[:1]}


def _items(parts: Said) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    status = "incomplete" if parts.ending == "length" else "completed"
    if parts.reasoning:
        content = [{"type": "reasoning_text", "text": parts.reasoning}]
        items.append({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": content})
    if parts.content or not parts.calls:
        text = {"type": "output_text", "text": parts.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": new_id("msg_"),
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    for call in parts.calls:
        items.append(
            {
                "type": "function_call",
                "id": new_id("fc_"),
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return items


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "function_call":
        yield _added(index, {**item, "arguments": "", "status": "in_progress"})
        kind = "response.function_call_arguments"
        yield f"{kind}.delta", {**at, "delta": item["arguments"]}
        yield f"{kind}.done", {**at, "name": item["name"], "arguments": item["arguments"]}
    else:
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        part = item["content"][0]
        inside = {**at, "content_index": 0}
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        yield _added(index, {**item, "content": []} | ({"status": "in_progress"} if more else {}))
        yield "response.content_part.added", {**inside, "part": {**part, "text": ""}}
        if part["text"]:
            yield f"response.{kind}.delta", {**inside, "delta": part["text"], **more}
        yield f"response.{kind}.done", {**inside, "text": part["text"], **more}
        yield "response.content_part.done", {**inside, "part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _added(index: int, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "response.output_item.added", {"output_index": index, "item": item}
