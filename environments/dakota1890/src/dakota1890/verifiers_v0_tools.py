"""The tools over the record, for the v0 API of `verifiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import verifiers as vf

from dakota1890.rows import from_info
from dakota1890.tools import TOOLS, DakotaTools

_TYPES = {"string": str, "integer": int}


class DakotaToolEnv(vf.StatefulToolEnv):
    """At most `max_calls` calls a rollout; the model reads what is wrong with a call."""

    def __init__(self, *, max_calls: int, **options: Any) -> None:
        super().__init__(
            tools=[], max_turns=max_calls + 2, error_formatter=lambda error: f"Error: {error}", **options
        )
        self._max_calls = max_calls
        self.tool_defs = [vf.Tool(**tool["function"]) for tool in TOOLS]
        for tool in TOOLS:
            self.tool_monitor_rubric.add_tool_metric(tool["function"]["name"])

    def update_tool_args(
        self,
        tool_name: str,
        tool_args: dict[str, Any],
        messages: vf.Messages,
        state: vf.State,
        **_: Any,
    ) -> dict[str, Any]:
        """The arguments together with the rollout: what a tool tells depends on its task."""
        return {"arguments": tool_args, "state": state}

    async def call_tool(
        self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **_: Any
    ) -> vf.ToolMessage:
        """Run a tool. Raises ValueError for a call that no tool takes and when no call is left."""
        state = tool_args["state"]
        state["calls_made"] = state.get("calls_made", 0) + 1
        if state["calls_made"] > self._max_calls:
            raise ValueError("no calls are left. Answer now.")
        check_call(tool_name, tool_args["arguments"])
        data = from_info(state["info"])[1]
        content = DakotaTools(data).call(tool_name, tool_args["arguments"])
        return vf.ToolMessage(role="tool", content=content, tool_call_id=tool_call_id)


def check_call(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError, for the model to read, unless `arguments` fit the schema of the tool `name`."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    if name not in schemas:
        raise ValueError(f"there is no tool {name!r}. There are: {', '.join(schemas)}.")
    properties = schemas[name]["properties"]
    for argument in schemas[name]["required"]:
        if argument not in arguments:
            raise ValueError(f"{name} needs the argument {argument!r}.")
    for argument, value in arguments.items():
        if argument not in properties:
            raise ValueError(f"{name} has no argument {argument!r}. There are: {', '.join(properties)}.")
        kind = properties[argument]["type"]
        if type(value) is not _TYPES[kind]:
            raise ValueError(f"the argument {argument!r} of {name} must be of type {kind}.")
