"""Run a conversation in which the model calls tools before it answers."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from buckeye.envs.base import Message, Policy, Reply, Tool
from buckeye.envs.call_arguments import read_arguments

StopReason = Literal["answered", "truncated", "turn_limit"]
"""Reason for the end of a conversation.

`answered`: the last reply has no calls. `truncated`: the last reply reached a length limit. `turn_limit`: the
reply in the last turn has calls.
"""

CallTool = Callable[[str, Mapping[str, Any]], str | Awaitable[str]]
"""Function that runs a tool, given its name and valid arguments. A synchronous function must be fast."""

_MAX_RESULT = 8_000
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolError(Exception):
    """Error of a tool. The model reads the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolPlay:
    """Result of a conversation. `tool_calls` counts all calls, and `tool_errors` the calls with an error."""

    reply: Reply
    messages: tuple[Message, ...]
    stop_reason: StopReason
    n_turns: int
    tool_calls: int
    tool_errors: int

    @property
    def components(self) -> dict[str, float]:
        """The counts as `components` of an `Outcome`."""
        counts = {"n_turns": self.n_turns, "tool_calls": self.tool_calls, "tool_errors": self.tool_errors}
        return {name: float(count) for name, count in counts.items()}


async def play_with_tools(
    policy: Policy,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    call: CallTool,
    *,
    max_calls: int,
    timeout: float = 60.0,
) -> ToolPlay:
    """Call the policy until it replies without a tool call, in at most `max_calls` + 2 turns.

    Run the first `max_calls` calls, each for at most `timeout` seconds. The result of the last call tells the
    model to answer. For a wrong call (unknown tool, invalid arguments, `ToolError` or timeout), the model
    reads an error text. Any other exception of a tool propagates, so that the rollout has an error and no
    reward.
    """
    conversation = list(messages)
    calls = errors = turns = 0
    while True:
        reply = await policy.chat(conversation, tools=tools)
        turns += 1
        conversation.append(reply.message)
        requests = reply.message.get("tool_calls") or ()
        stop = _stop_reason(reply, bool(requests), turns_left=max_calls + 2 - turns)
        if stop is not None:
            return ToolPlay(
                reply=reply,
                messages=tuple(conversation),
                stop_reason=stop,
                n_turns=turns,
                tool_calls=calls + len(requests),
                tool_errors=errors,
            )
        for request in requests:
            calls += 1
            if calls > max_calls:
                result, failed = "Error: no calls are left. Answer now.", True
            else:
                result, failed = await _run_call(request["function"], tools, call, timeout)
            if calls == max_calls:
                result += "\n(No calls are left. Answer now.)"
            errors += failed
            name = request["function"]["name"] or "unknown"
            conversation.append(
                {"role": "tool", "tool_call_id": request["id"], "name": name, "content": result}
            )


def _stop_reason(reply: Reply, has_calls: bool, *, turns_left: int) -> StopReason | None:
    if reply.finish_reason == "length":
        return "truncated"
    if not has_calls:
        return "answered"
    return "turn_limit" if turns_left <= 0 else None


async def _run_call(
    function: Mapping[str, Any], tools: Sequence[Tool], call: CallTool, timeout: float
) -> tuple[str, bool]:
    """Return the text of a call's result, and True if it is an error."""
    deadline = asyncio.timeout(timeout)
    try:
        name, arguments = _check_call(function, tools)
        result = call(name, arguments)
        if inspect.isawaitable(result):
            async with deadline:
                result = await result
    except TimeoutError:
        if not deadline.expired():
            raise  # raised by the tool, not by the timeout
        return f"Error: no result within {timeout:g} s.", True
    except ToolError as error:
        return f"Error: {error}", True
    if not isinstance(result, str):
        raise TypeError(f"the tool {name!r} returned {type(result).__name__}, not text")
    if len(result) > _MAX_RESULT:
        result = f"{result[:_MAX_RESULT]}\n(cut: {len(result) - _MAX_RESULT} more characters)"
    return result, False


def _check_call(function: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of a valid call. Raise `ToolError` for an invalid call."""
    name, arguments = function["name"], function["arguments"]
    if not name:
        raise ToolError('the call could not be read. Write JSON: {"name": "...", "arguments": {...}}.')
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if name not in schemas:
        raise ToolError(f"no tool {name!r}. {_list_choices(name, schemas)}")
    try:
        arguments = read_arguments(arguments)
    except ValueError as error:
        raise ToolError(f"the arguments of {name} {error}.") from None
    _check_arguments(name, arguments, schemas[name])
    return name, arguments


def _check_arguments(tool: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise `ToolError` if arguments violate `required`, `properties`, `type` or `enum` of the schema."""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            raise ToolError(f"{tool} needs the argument {name!r}.")
    for name, value in arguments.items():
        if name not in properties:
            if schema.get("additionalProperties", False) is not False:
                continue
            raise ToolError(f"{tool} has no argument {name!r}. {_list_choices(name, properties)}")
        _check_value(f"the argument {name!r} of {tool}", value, properties[name])


def _check_value(what: str, value: Any, schema: Mapping[str, Any]) -> None:
    types = schema.get("type", ())
    types = (types,) if isinstance(types, str) else tuple(types)
    if types and not any(_has_type(value, json_type) for json_type in types):
        raise ToolError(f"{what} must be of type {' or '.join(types)}.")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{what} must be one of {json.dumps(schema['enum'], ensure_ascii=False)}.")


def _has_type(value: Any, json_type: str) -> bool:
    if isinstance(value, bool):
        return json_type == "boolean"
    if json_type == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(json_type, (object,)))


def _list_choices(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    suggestion = f" Did you mean {close[0]}?" if close else ""
    return f"Available: {', '.join(known) or 'none'}.{suggestion}"
