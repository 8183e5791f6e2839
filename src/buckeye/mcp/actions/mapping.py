"""Convert a model's calls to MCP tool calls, as `action_mappings` of the configuration defines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from buckeye.config.problems import closest, did_you_mean
from buckeye.mcp.actions.action_schema import (
    Action,
    OneArgument,
    SeveralArguments,
    StaticArgument,
    source_names,
)
from buckeye.mcp.actions.literals import shorten
from buckeye.mcp.actions.operations import ExpressionError
from buckeye.mcp.actions.parser import ParsedCall


class ActionError(Exception):
    """A call that cannot run. The model reads the message."""


@dataclass(frozen=True, slots=True)
class BoundCall:
    """Call of an MCP tool. A call with `tool` None ends the rollout."""

    tool: str | None
    arguments: dict[str, Any]


def bind_call(
    call: ParsedCall, actions: Mapping[str, Action], schemas: Mapping[str, Mapping[str, Any]]
) -> BoundCall:
    """Return the MCP call for a model's call. `schemas` maps each tool to its input schema.

    Raises ActionError for an unknown action, for unknown or missing arguments, and for a failing transform.
    """
    action = actions.get(call.name)
    if action is None:
        raise ActionError(f"no action {shorten(call.name)}. Use one of: {', '.join(actions)}.")
    given = _name_arguments(call, action)
    values = {name: _build_value(source, given, action) for name, source in action.sources.items()}
    arguments = {name: value[0] for name, value in values.items() if value}
    required = schemas.get(action.tool or "", {}).get("required") or ()
    missing = [name for name in required if name not in arguments]
    if missing:
        raise ActionError(f"{action.name} needs {_action_argument_names(missing, action)}. {_usage(action)}")
    return BoundCall(action.tool, arguments)


def _name_arguments(call: ParsedCall, action: Action) -> dict[str, Any]:
    """Return all arguments of a call by name, positional arguments too. Raises ActionError."""
    if len(call.args) > len(action.positional):
        raise ActionError(
            f"{action.name} was given {len(call.args)} arguments and takes "
            f"{len(action.positional) or 'none'} by position. {_usage(action)}"
        )
    given = dict(zip(action.positional, call.args, strict=False))
    for name, value in call.kwargs.items():
        if name in given:
            raise ActionError(f"{action.name} was given {shorten(name)} twice. {_usage(action)}")
        if name not in action.parameters:
            near = did_you_mean(closest(name[:100], action.parameters, count=1))
            raise ActionError(f"{action.name} has no argument {shorten(name)}.{near} {_usage(action)}")
        given[name] = value
    return given


def _build_value(source: Any, given: Mapping[str, Any], action: Action) -> tuple[Any, ...]:
    """Return a tuple with the value of one tool argument, or an empty tuple to omit the argument."""
    if isinstance(source, SeveralArguments):
        return _build_list(source, given, action)
    if not isinstance(source, OneArgument):
        return (source.static if isinstance(source, StaticArgument) else source,)
    if source.from_arg not in given and "default" not in source.model_fields_set:
        return ()
    value = given.get(source.from_arg, source.default)
    if value is None or source.compiled is None:
        return (value,)
    try:
        return (source.compiled(value, given),)
    except ExpressionError as error:
        raise ActionError(f"{action.name}: {source.from_arg} cannot be used: {error}.") from None


def _build_list(source: SeveralArguments, given: Mapping[str, Any], action: Action) -> tuple[Any, ...]:
    if source.defaults:
        pairs = zip(source.from_args, source.defaults, strict=True)
        return ([given.get(name, default) for name, default in pairs],)
    missing = [name for name in source.from_args if name not in given]
    if not missing:
        return ([given[name] for name in source.from_args],)
    if len(missing) == len(source.from_args):
        return ()
    raise ActionError(f"{action.name} needs {', '.join(missing)} too. {_usage(action)}")


def _action_argument_names(missing: list[str], action: Action) -> str:
    """Return the action's arguments that would supply the missing arguments of the tool."""
    names = [
        " and ".join(source_names(action.sources[name])) if name in action.sources else name
        for name in missing
    ]
    return ", ".join(names)


def _usage(action: Action) -> str:
    return f"Usage: {action.name}({', '.join(action.parameters)})"
