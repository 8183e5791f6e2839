"""Generates the configuration of an environment from its tools; equal tools give equal text."""

from __future__ import annotations

import json
import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from buckeye.mcp.tasks.lock_file import ToolEntry
from buckeye.setup.init.tool_choice import ActionPlan, Parameter, PlannedAction, plan_actions

CHECK = "CHECK"
"""The word that marks a comment where a person must decide."""
SERVER_KEY = "server"
"""The key of `job.metadata` for the server of the configuration."""
_LONGEST_TEXT = {"tool": 400, "parameter": 200}
_WIDTH = 100
_WEIGHTS = WeightsConfig(task_completion=0.8, tool_execution=0.1, format_compliance=0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentName:
    """Names of the environment: `name` in texts, and `image` with its tag if it has one."""

    name: str
    image: str


@dataclass(frozen=True, slots=True)
class GeneratedConfig:
    """A generated configuration.

    `decisions` are the comments in it that wait for a person. `notes` list what was left out.
    """

    text: str
    plan: ActionPlan
    decisions: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Remarks:
    decisions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def generate_config(
    environment: EnvironmentName,
    tools: Sequence[ToolEntry],
    *,
    setup_tools: Collection[str] = (),
    grading_tools: Collection[str] = (),
    context_values: Mapping[str, Any] | None = None,
    requested: Sequence[str] = (),
    server: Mapping[str, Any] | None = None,
    files: str | None = None,
    workdir_path: str | None = None,
) -> GeneratedConfig:
    """Return the configuration, with its YAML text, for these tools.

    `setup_tools` and `grading_tools` name the tools that tasks use for that, and `requested` those that the user
    requested. `context_values` are values for arguments that all tools have, by name. `server` is the server
    as tasks name it. `files` is a folder that is copied for every rollout. `workdir_path` is the path there of what
    the command line names, if that is a single path.
    """
    plan = plan_actions(
        tools,
        setup_tools=setup_tools,
        grading_tools=grading_tools,
        requested=requested,
        private=files is not None,
        values=context_values or {},
        workdir_path=workdir_path,
    )
    remarks = _Remarks()
    body = [
        *_job(environment, server),
        "",
        *(["# every rollout begins with a copy of it", f"files: {quoted(files)}", ""] if files else []),
        "system_prompt: |",
        *(f"  {line}" if line else "" for line in _prompt(environment, plan)),
        "",
        *_parser(),
        "",
        "action_mappings:",
        *_mappings(plan, remarks),
        "",
        "rubric:",
        "  weights:",
        *(f"    {name}: {value}" for name, value in _WEIGHTS),
        "",
        "defaults:",
        f"  max_turns: {DefaultsConfig().max_turns}",
    ]
    name = sanitize_text(environment.name)
    head = [f"# How a model acts in {name}, and how it is paid. Written by `buckeye rl init`."]
    if remarks.decisions:
        head.append(f"# Look at what is marked {CHECK}: a person should decide it.")
    text = "\n".join([*head, *body]) + "\n"
    return GeneratedConfig(text, plan, tuple(remarks.decisions), tuple(remarks.notes))


def quoted(text: str) -> str:
    """Return a text as YAML in double quotes, with invisible characters escaped."""
    return "".join(_escaped(sign) for sign in json.dumps(text, ensure_ascii=False))


def _escaped(sign: str) -> str:
    if sign == " " or unicodedata.category(sign)[0] not in "CZ":
        return sign
    return f"\\u{ord(sign):04x}" if ord(sign) <= 0xFFFF else f"\\U{ord(sign):08x}"


def _job(environment: EnvironmentName, server: Mapping[str, Any] | None) -> Iterator[str]:
    yield "job:"
    yield f"  name: {quoted(f'RL Training - {sanitize_text(environment.name)}')}"
    yield "  metadata:"
    yield f"    environment: {quoted(environment.image)}"
    if server is not None:
        yield "    # as mcp_config of a task names it"
        yield f"    {SERVER_KEY}: {json.dumps(server, ensure_ascii=True)}"


def _parser() -> Iterator[str]:
    parser = ParserConfig()
    yield "parser:"
    yield f"  use_thinking: {str(parser.use_thinking).lower()}"
    yield f"  xml_weight: {parser.xml_weight}"
    yield f"  action_weight: {parser.action_weight}"


def _prompt(environment: EnvironmentName, plan: ActionPlan) -> Iterator[str]:
    yield f"You are an AI agent interacting with {sanitize_text(environment.name)}."
    yield ""
    yield "Available tools:"
    for action in plan.actions:
        yield from _offer(action, plan)
    yield f"- {DONE}(): End the task. Call it when the task is finished."
    yield f"  Usage: <tool>{DONE}()</tool>"
    yield ""
    yield "Think first, between <think> and </think>. Then write one tool call, and nothing after it."
    yield "Its result is in the next message. Texts are written in quotes."
    shown = [(one, action) for action in plan.actions for one in _shown(action, plan)]
    if shown:
        yield "Arguments are given in the order shown, or by name, as name=value."
    if any(not one.required or object_marks_optional(one.schema, action.schema) for one, action in shown):
        yield "Those with a question mark may be left out."


def _offer(action: PlannedAction, plan: ActionPlan) -> Iterator[str]:
    """Yield the lines that describe an action to the model."""
    described = _bounded(action.tool.description, "tool")
    yield f"- {_signature(action, plan)}" + (f": {described}" if described else "")
    yield f"  Usage: <tool>{_usage(action, plan)}</tool>"
    for parameter in _shown(action, plan):
        text = _bounded(str(parameter.schema.get("description") or ""), "parameter")
        if text:
            yield f"    {parameter.argument_name}: {text}"


def _signature(action: PlannedAction, plan: ActionPlan) -> str:
    parts = [
        f"{one.argument_name}{'' if one.required else '?'}: "
        f"{describe_type(one.schema, action.schema, optional=not one.required)}"
        f"{describe_default(one.schema)}"
        for one in _shown(action, plan)
    ]
    return f"{action.name}({', '.join(parts)})"


def _usage(action: PlannedAction, plan: ActionPlan) -> str:
    needed = [one for one in _shown(action, plan) if one.required]
    return f"{action.name}({', '.join(_sample(one, action) for one in needed)})"


def _sample(parameter: Parameter, action: PlannedAction) -> str:
    try:
        return format_literal(make_example(parameter.schema, action.schema))
    except NoExampleError:
        return '"..."'


def _shown(action: PlannedAction, plan: ActionPlan) -> list[Parameter]:
    """Return the parameters that the model provides."""
    return [one for one in action.parameters if one.name not in plan.context]


def _bounded(text: str, kind: str) -> str:
    text, most = sanitize_text(text), _LONGEST_TEXT[kind]
    return text if len(text) <= most else text[:most].rstrip() + "…"


def _mappings(plan: ActionPlan, remarks: _Remarks) -> Iterator[str]:
    for action in plan.actions:
        if action.dropped:
            yield from _comment(f"Not to be given: {', '.join(map(sanitize_text, action.dropped))}.")
        yield from _mapping(action, plan)
    yield f"  {DONE}:"
    yield "    _tool: null"
    for flagged in plan.flagged:
        yield ""
        yield from _comment(
            f"{CHECK} {flagged.action.name}: {flagged.reason}. It is not mapped. To let the model call it, "
            "remove the # below, and describe it in system_prompt as:",
            remarks,
        )
        described = _bounded(flagged.action.tool.description, "tool")
        yield f"  #   - {_signature(flagged.action, plan)}" + (f": {described}" if described else "")
        for line in _mapping(flagged.action, plan):
            yield f"  # {line[2:]}"
    for tool, reason in plan.left_out.items():
        remarks.notes.append(f"{sanitize_text(tool)} is left out: {reason}")


def _mapping(action: PlannedAction, plan: ActionPlan) -> Iterator[str]:
    yield f"  {_key(action.name)}:"
    yield f"    _tool: {quoted(action.tool.name)}"
    yield "    _parser:"
    yield f"      positional: [{', '.join(quoted(one.argument_name) for one in _shown(action, plan))}]"
    for one in action.parameters:
        if one.name in plan.context:
            value = plan.context[one.name]
            yield f"    {_key(one.name)}: {quoted(value) if isinstance(value, str) else value}"
        else:
            yield f"    {_key(one.name)}:"
            yield f"      from_arg: {quoted(one.argument_name)}"


def _comment(text: str, remarks: _Remarks | None = None) -> Iterator[str]:
    if remarks is not None:
        remarks.decisions.append(text.removeprefix(f"{CHECK} "))
    for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False):
        yield f"  # {line}"


def _key(name: str) -> str:
    """Return a YAML key, quoted if YAML could read it as anything but this text."""
    plain = re.fullmatch(r"(?!(true|false|null|yes|no|on|off)$)[A-Za-z_][A-Za-z0-9_.\-]*", name, re.I)
    return name if plain else quoted(name)
