"""Generate the configuration of an environment from its tools; equal tools give equal text."""

from __future__ import annotations

import json
import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from buckeye.mcp.actions.action_schema import DONE
from buckeye.mcp.actions.schema_text import (
    NoExampleError,
    describe_default,
    describe_type,
    format_literal,
    make_example,
    object_marks_optional,
    sanitize_text,
)
from buckeye.mcp.config import DefaultsConfig, ParserConfig, WeightsConfig
from buckeye.setup.init.tool_choice import ActionPlan, Parameter, PlannedAction

CHECK = "CHECK"
"""Mark of a comment that requires a decision by a person."""
SERVER_KEY = "server"
"""The key of `job.metadata` for the server of the configuration."""
_MAX_TEXT_LENGTH = {"tool": 400, "parameter": 200}
_COMMENT_WIDTH = 100
_WEIGHTS = WeightsConfig(task_completion=0.8, tool_execution=0.1, format_compliance=0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentName:
    """Names of the environment. `image` is the image with its tag, or else the name."""

    name: str
    image: str


@dataclass(frozen=True, slots=True)
class GeneratedConfig:
    """A generated configuration. `notes` list the tools left out."""

    text: str
    plan: ActionPlan
    notes: tuple[str, ...]


def generate_config(
    environment: EnvironmentName,
    plan: ActionPlan,
    *,
    server: Mapping[str, Any] | None = None,
    files: str | None = None,
) -> GeneratedConfig:
    """Return the configuration, with its YAML text, for the actions of a plan.

    `server` is the server in the form of a task's `mcp_config`. `files` is a folder that is copied for every
    rollout.
    """
    body = [
        *_job_lines(environment, server),
        "",
        *(["# copied for every rollout", f"files: {quoted(files)}", ""] if files else []),
        "system_prompt: |",
        *(f"  {line}" if line else "" for line in _prompt_lines(environment, plan)),
        "",
        *_parser_lines(),
        "",
        "action_mappings:",
        *_mappings_lines(plan),
        "",
        "rubric:",
        "  weights:",
        *(f"    {name}: {value}" for name, value in _WEIGHTS),
        "",
        "defaults:",
        f"  max_turns: {DefaultsConfig().max_turns}",
    ]
    name = sanitize_text(environment.name)
    head = [f"# Actions and rewards of a model in {name}. Written by `buckeye rl init`."]
    if plan.flagged:
        head.append(f"# Decide about the actions marked {CHECK}.")
    text = "\n".join([*head, *body]) + "\n"
    notes = (f"{sanitize_text(tool)} is left out: {reason}" for tool, reason in plan.left_out.items())
    return GeneratedConfig(text, plan, tuple(notes))


def quoted(text: str) -> str:
    """Return a text as YAML in double quotes, with invisible characters escaped."""
    return "".join(_escape(character) for character in json.dumps(text, ensure_ascii=False))


def _escape(character: str) -> str:
    if character == " " or unicodedata.category(character)[0] not in "CZ":
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _job_lines(environment: EnvironmentName, server: Mapping[str, Any] | None) -> Iterator[str]:
    yield "job:"
    yield f"  name: {quoted(f'RL Training - {sanitize_text(environment.name)}')}"
    yield "  metadata:"
    yield f"    environment: {quoted(environment.image)}"
    if server is not None:
        yield "    # as in mcp_config of a task"
        yield f"    {SERVER_KEY}: {json.dumps(server, ensure_ascii=True)}"


def _parser_lines() -> Iterator[str]:
    parser = ParserConfig()
    yield "parser:"
    yield f"  use_thinking: {str(parser.use_thinking).lower()}"
    yield f"  xml_weight: {parser.xml_weight}"
    yield f"  action_weight: {parser.action_weight}"


def _prompt_lines(environment: EnvironmentName, plan: ActionPlan) -> Iterator[str]:
    yield f"You are an AI agent interacting with {sanitize_text(environment.name)}."
    yield ""
    yield "Available tools:"
    for action in plan.actions:
        yield from _action_lines(action, plan)
    yield f"- {DONE}(): End the task. Call it when the task is finished."
    yield f"  Usage: <tool>{DONE}()</tool>"
    yield ""
    yield "Think first, between <think> and </think>. Then write one tool call, and nothing after it."
    yield "Its result is in the next message. Texts are written in quotes."
    shown = [(parameter, action) for action in plan.actions for parameter in _model_parameters(action, plan)]
    if shown:
        yield "Arguments are given in the order shown, or by name, as name=value."
    if any(not p.required or object_marks_optional(p.schema, action.schema) for p, action in shown):
        yield "Those with a question mark may be left out."


def _action_lines(action: PlannedAction, plan: ActionPlan) -> Iterator[str]:
    """Yield the lines that describe an action to the model."""
    description = _shorten(action.tool.description, "tool")
    yield f"- {_signature(action, plan)}" + (f": {description}" if description else "")
    yield f"  Usage: <tool>{_example_call(action, plan)}</tool>"
    for parameter in _model_parameters(action, plan):
        text = _shorten(str(parameter.schema.get("description") or ""), "parameter")
        if text:
            yield f"    {parameter.argument_name}: {text}"


def _signature(action: PlannedAction, plan: ActionPlan) -> str:
    parts = [
        f"{parameter.argument_name}{'' if parameter.required else '?'}: "
        f"{describe_type(parameter.schema, action.schema, optional=not parameter.required)}"
        f"{describe_default(parameter.schema)}"
        for parameter in _model_parameters(action, plan)
    ]
    return f"{action.name}({', '.join(parts)})"


def _example_call(action: PlannedAction, plan: ActionPlan) -> str:
    required = [parameter for parameter in _model_parameters(action, plan) if parameter.required]
    return f"{action.name}({', '.join(_example_value(parameter, action) for parameter in required)})"


def _example_value(parameter: Parameter, action: PlannedAction) -> str:
    try:
        return format_literal(make_example(parameter.schema, action.schema))
    except NoExampleError:
        return '"..."'


def _model_parameters(action: PlannedAction, plan: ActionPlan) -> list[Parameter]:
    """Return the parameters that the model provides."""
    return [parameter for parameter in action.parameters if parameter.name not in plan.context]


def _shorten(text: str, kind: str) -> str:
    text, max_length = sanitize_text(text), _MAX_TEXT_LENGTH[kind]
    return text if len(text) <= max_length else text[:max_length].rstrip() + "…"


def _mappings_lines(plan: ActionPlan) -> Iterator[str]:
    for action in plan.actions:
        if action.dropped:
            yield from _comment_lines(f"Not supported: {', '.join(map(sanitize_text, action.dropped))}.")
        yield from _mapping_lines(action, plan)
    yield f"  {DONE}:"
    yield "    _tool: null"
    for flagged in plan.flagged:
        yield ""
        yield from _comment_lines(
            f"{CHECK} {flagged.action.name}: {flagged.reason}. Not mapped. To let the model call it, "
            "uncomment the mapping below, and add this line to system_prompt:"
        )
        description = _shorten(flagged.action.tool.description, "tool")
        yield f"  #   - {_signature(flagged.action, plan)}" + (f": {description}" if description else "")
        for line in _mapping_lines(flagged.action, plan):
            yield f"  # {line[2:]}"


def _mapping_lines(action: PlannedAction, plan: ActionPlan) -> Iterator[str]:
    yield f"  {_key(action.name)}:"
    yield f"    _tool: {quoted(action.tool.name)}"
    yield "    _parser:"
    positional = [quoted(parameter.argument_name) for parameter in _model_parameters(action, plan)]
    yield f"      positional: [{', '.join(positional)}]"
    for parameter in action.parameters:
        if parameter.name in plan.context:
            value = plan.context[parameter.name]
            yield f"    {_key(parameter.name)}: {quoted(value) if isinstance(value, str) else value}"
        else:
            yield f"    {_key(parameter.name)}:"
            yield f"      from_arg: {quoted(parameter.argument_name)}"


def _comment_lines(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, _COMMENT_WIDTH, break_long_words=False, break_on_hyphens=False):
        yield f"  # {line}"


def _key(name: str) -> str:
    """Return a YAML key, quoted if YAML could read it as anything but this text."""
    is_plain = re.fullmatch(r"(?!(true|false|null|yes|no|on|off)$)[A-Za-z_][A-Za-z0-9_.\-]*", name, re.I)
    return name if is_plain else quoted(name)
