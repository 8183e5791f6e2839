"""Describe actions as tools in OpenAI's format, and make replies that call an action."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from buckeye.envs.base import Reply, Tool
from buckeye.mcp.actions.action_schema import Action, OneArgument, SeveralArguments, source_names
from buckeye.mcp.actions.schema_text import format_literal
from buckeye.mcp.config import GymConfig, ParserConfig

if TYPE_CHECKING:
    import mcp_types as types


def build_action_tools(config: GymConfig, tools: Mapping[str, types.Tool]) -> list[Tool]:
    """Return one tool per action.

    An argument without a transform has the schema of the MCP tool's argument. Other arguments accept any
    value.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": action.name,
                "description": (tools[action.tool].description or "") if action.tool else "End the task.",
                "parameters": _parameters(action, tools[action.tool].input_schema if action.tool else {}),
            },
        }
        for action in config.actions.values()
    ]


def call_form(parser: ParserConfig) -> str:
    """Return the template of a reply with a call in the `xml` format. `{call}` marks the call."""
    thought = "<think>I try this.</think>" if parser.use_thinking else ""
    return f"{thought}<tool>{{call}}</tool>"


def make_call_reply(name: str, arguments: Mapping[str, Any], *, form: str) -> Reply:
    """Return a reply that calls a tool: as text if the environment has a `form`, else as a native call."""
    if form:
        given = ", ".join(f"{key}={format_literal(value)}" for key, value in arguments.items())
        text = form.replace("{call}", f"{name}({given})")
        return Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})
    called = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": "call_0", "type": "function", "function": called}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return Reply(text=f"{name}({called['arguments']})", finish_reason="stop", message=message)


def _parameters(action: Action, schema: Mapping[str, Any]) -> dict[str, Any]:
    known = schema.get("properties") or {}
    required_by_tool = schema.get("required") or ()
    properties: dict[str, Any] = {name: {} for name in action.parameters}
    required: list[str] = []
    for argument, source in action.sources.items():
        if isinstance(source, OneArgument) and source.transform is None:
            properties[source.from_arg] = dict(known.get(argument) or {})
        has_default = isinstance(source, OneArgument) and "default" in source.model_fields_set
        has_defaults = isinstance(source, SeveralArguments) and source.defaults
        if argument in required_by_tool and not (has_default or has_defaults):
            required += source_names(source)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {
        "type": "object",
        "properties": properties,
        "required": list(dict.fromkeys(required)),
        "additionalProperties": False,
        **shared,
    }
