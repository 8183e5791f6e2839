"""Subclasses for `verifiers` v1: a harness that runs in the worker, and a client for many endpoints.

This module is imported only if `verifiers` 0.4 is installed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClient
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from .base import Json, first_messages
from .model import ModelError, post

HARNESS_ID = "buckeye-in-process"
__all__ = ["InProcessHarness"]

# verifiers imports harnesses by name
sys.modules.setdefault(HARNESS_ID.replace("-", "_"), sys.modules[__name__])


class InProcessConfig(vf.HarnessConfig):
    """Configuration with only the settings that every harness has."""


class InProcessHarness(vf.Harness[InProcessConfig]):
    """Harness in this process: it calls the model and the task's tools, until a reply has no calls."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run turns until the model calls no tools, or verifiers refuses a reply and records the reason."""
        messages = self._first_messages(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                try:
                    response = await post(f"{endpoint}/chat/completions", body, key=secret)
                except ModelError as error:
                    return vf.ProgramResult(1, "", str(error))
                message = response["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(0, "", "")
                for call in calls:
                    content = await _result(call["function"], connections, dispatch)
                    tool_message = {"role": "tool", "tool_call_id": call["id"], "content": content}
                    messages.append(bound_tool_message(tool_message))

    def _first_messages(self, data: vf.TaskData) -> list[Json]:
        system, prompt = self.resolve_prompt(data)
        if prompt is not None and not isinstance(prompt, str):
            prompt = [message_to_wire(message) for message in prompt]
        return first_messages(system, prompt)


async def _result(function: Json, connections: Any, dispatch: Any) -> Any:
    """Return a tool's result, or an error text for the model if the call is invalid.

    The error texts equal those of verifiers' own harnesses.
    """
    name = function["name"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    return await call_mcp(connections, dispatch, name, arguments)


class RoutingClient(EvalClient):
    """Client that sends the calls of each rollout to the rollout's endpoint.

    verifiers would keep one client for every endpoint, and every rollout has a new endpoint.
    """

    def __init__(self, config: vf.EvalClientConfig) -> None:
        super().__init__(config)
        self.config = config
        self.routes: dict[str, Json] = {}
        self.untrained: set[str] = set()
        """Trace ids of untrained agents. Their replies are not recorded."""

    def _client_of(self, session_id: str | None) -> EvalClient:
        """Return this client with the address and key of a rollout, identified by its trace id."""
        endpoint = self.routes[session_id or ""]
        client = EvalClient.__new__(EvalClient)
        client.__dict__.update(self.__dict__)
        client.base_url, client.api_key = endpoint["base_url"], endpoint["api_key"]
        return client

    def _mark_untrained(self, body: dict, session_id: str | None) -> dict:
        return {**body, "trained": False} if session_id in self.untrained else body

    async def get_response(
        self,
        dialect: Any,
        body: dict,
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        return await self._client_of(session_id).get_response(
            dialect, self._mark_untrained(body, session_id), sampling, session_id, turn, headers
        )

    async def relay(
        self,
        dialect: Any,
        body: dict,
        session_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        request = self._mark_untrained(body, session_id)
        return await self._client_of(session_id).relay(dialect, request, session_id, headers)
