"""Common form of a request in all APIs: a call of the policy, and functions that format its replies."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.chat.messages import ToolChoice
from buckeye.chat.openai_api import ChatRequest, convert_request
from buckeye.envs.base import CallOptions, Reply
from buckeye.workers.proxy.request_fields import strip_messages
from buckeye.workers.proxy.rollout import PolicyCall


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Request to the proxy.

    `to_json` formats the replies as a complete response, `to_events` as server-sent events. `is_streaming` is
    True if the client requested a stream.
    """

    call: PolicyCall
    is_streaming: bool
    to_json: Callable[[Sequence[Reply]], dict[str, Any]]
    to_events: Callable[[Sequence[Reply]], list[bytes]]


def chat_call(fields: dict[str, Any], dropped: list[str]) -> tuple[ChatRequest, PolicyCall]:
    """Return a request in OpenAI's chat format, and its call of the policy. Raises `UsageError`.

    `dropped` names the ignored settings. This function appends ignored fields of messages.
    """
    body = convert_request(
        {**fields, "messages": strip_messages(fields.get("messages"), dropped)}, ChatRequest
    )
    call = PolicyCall(
        messages=[message.to_template_message() for message in body.messages],
        tools=body.offered_tools(),
        options=CallOptions(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            stop=body.stop_strings(),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            must_call=body.forces_a_call,
            tool=body.forced_tool() if body.forces_a_call else None,
            logprobs=bool(body.logprobs),
        ),
        n=body.n or 1,
        dropped=dropped,
    )
    return body, call


def chat_tool(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's chat format."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def named_tool_choice(name: str | None) -> dict[str, Any]:
    """Return the `tool_choice` that requires one tool, in OpenAI's chat format."""
    return {"type": "function", "function": {"name": name}}


def allows_one_call(body: ChatRequest) -> bool:
    """Return True if a reply may have at most one tool call."""
    return body.parallel_tool_calls is False or isinstance(body.tool_choice, ToolChoice)


def new_id(prefix: str) -> str:
    """Return a new id for a response."""
    return f"{prefix}{uuid.uuid4().hex}"
