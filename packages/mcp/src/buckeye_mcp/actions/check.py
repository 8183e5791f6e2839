"""Checks `action_mappings` and turns it into actions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from buckeye.config.problems import closest, did_you_mean
from buckeye.config.settings import KeyPath
from buckeye_mcp.actions.expressions import Transform, compile_transform
from buckeye_mcp.actions.mapping import Action, Constant, FromArg, FromArgs, Source
from buckeye_mcp.actions.operations import ExpressionError

DONE = "done"
"""The action that ends a rollout. It is there in every configuration."""
RESERVED_TOOLS = ("setup", "evaluate")
"""Tools that prepare and grade, which no action may stand for, of whichever server."""
ONE_KEYS = ("from_arg", "default", "transform", "use_context")
SEVERAL_KEYS = ("from_args", "defaults")
_KINDS = {"static": ("static",), "from_arg": ONE_KEYS, "from_args": SEVERAL_KEYS}
_NAME = re.compile(r"[^\W\d][\w.\-/]*")
_PARAMETER = re.compile(r"[^\W\d][\w.-]*")
_TOOL, _PARSER, _POSITIONAL = "_tool", "_parser", "positional"
_ARGUMENT_SCHEMA = {
    "description": "A constant, or what the argument is made from.",
    "anyOf": [
        {"type": ["string", "number", "boolean", "array", "null"]},
        {
            "type": "object",
            "required": ["static"],
            "properties": {"static": {"description": "A constant of any kind."}},
            "additionalProperties": False,
        },
        {
            "type": "object",
            "required": ["from_arg"],
            "properties": {
                "from_arg": {"type": "string", "description": "The argument of the action."},
                "default": {"description": "Its value if it is not given; without one it is left out."},
                "transform": {"type": "string", "description": "An expression, as `lambda x: x * 1000`."},
                "use_context": {
                    "type": "boolean",
                    "description": "Whether the transform also takes all arguments of the call.",
                },
            },
            "additionalProperties": False,
        },
        {
            "type": "object",
            "required": ["from_args"],
            "properties": {
                "from_args": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "defaults": {"type": "array", "description": "A value for each that is not given."},
            },
            "additionalProperties": False,
        },
    ],
}
ACTIONS_SCHEMA = {
    "additionalProperties": {
        "type": "object",
        "required": [_TOOL],
        "properties": {
            _TOOL: {
                "type": ["string", "null"],
                "not": {"pattern": f"(^|/)({'|'.join(RESERVED_TOOLS)})$"},
                "description": "The MCP tool; null ends the rollout.",
            },
            _PARSER: {
                "type": "object",
                "properties": {
                    _POSITIONAL: {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "The arguments that may be given without a name, in order.",
                    }
                },
                "additionalProperties": False,
            },
        },
        "patternProperties": {"^[^_]": _ARGUMENT_SCHEMA},
        "additionalProperties": False,
    }
}
"""The JSON Schema of `action_mappings`."""


@dataclass(frozen=True, slots=True)
class MappingProblem:
    """Something wrong with an action: `path` is its name and the keys below it."""

    path: KeyPath
    message: str


class _MappingError(ValueError):
    """Carries a MappingProblem up to the action that it is a problem of."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


def compile_actions(raw: Mapping[str, Any]) -> tuple[dict[str, Action], list[MappingProblem]]:
    """The actions, `done` among them, and what is wrong with the others."""
    actions, problems = {}, []
    for name, value in raw.items():
        found = list(_problems(name, value))
        problems += [MappingProblem((name, *error.path), str(error)) for error in found]
        if not found:
            actions[name] = _action(name, value)
    if DONE not in raw:
        actions[DONE] = Action(name=DONE, tool=None)
    return actions, problems


def _problems(name: str, value: Any) -> Iterator[_MappingError]:
    if not _NAME.fullmatch(name):
        yield _MappingError(f"{name!r} is no name that can be called")
    if not isinstance(value, Mapping):
        yield _MappingError("expected a table with _tool and the arguments of that tool")
        return
    if _TOOL not in value:
        yield _MappingError(f"{_TOOL} is required: the name of an MCP tool, or null to end the rollout")
    for key, part in value.items():
        try:
            if key.startswith("_"):
                _check_special(key, part)
            else:
                _source(part)
        except _MappingError as error:
            yield _MappingError(str(error), key, *error.path)


def _check_special(key: str, value: Any) -> None:
    if key == _TOOL:
        _check_tool(value)
    elif key == _PARSER:
        _positional(value)
    else:
        raise _MappingError(f"no such key.{did_you_mean(closest(key, (_TOOL, _PARSER)))}")


def _check_tool(value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise _MappingError("expected the name of an MCP tool, or null to end the rollout")
    if value is not None and value.rpartition("/")[2] in RESERVED_TOOLS:
        raise _MappingError(f"{value} prepares or grades the environment; the model must not call it")


def _action(name: str, value: Mapping[str, Any]) -> Action:
    return Action(
        name=name,
        tool=value[_TOOL],
        positional=_positional(value[_PARSER]) if _PARSER in value else (),
        sources={key: _source(part) for key, part in value.items() if not key.startswith("_")},
    )


def _positional(value: Any) -> tuple[str, ...]:
    if not isinstance(value, Mapping):
        raise _MappingError(f"expected a table, as {_POSITIONAL}: [name, other]")
    for key in value:
        if key != _POSITIONAL:
            raise _MappingError(f"no such key.{did_you_mean((_POSITIONAL,))}", key)
    names = value.get(_POSITIONAL, [])
    _check_names(names, _POSITIONAL)
    return tuple(names)


def _check_names(names: Any, key: str) -> None:
    if not isinstance(names, list):
        raise _MappingError("expected a list of names", key)
    for i, name in enumerate(names):
        if not isinstance(name, str) or not _PARAMETER.fullmatch(name):
            raise _MappingError(f"{name!r} is no name of an argument", key, i)
        if name in names[:i]:
            raise _MappingError(f"{name!r} is there twice", key, i)


def _source(value: Any) -> Source:
    """What an argument of the tool is made from. Raises _MappingError."""
    if not isinstance(value, Mapping):
        return Constant(value)
    kinds = [kind for kind in _KINDS if kind in value]
    if not kinds:
        near = did_you_mean([name for key in value for name in closest(key, _KINDS, count=1)][:1])
        raise _MappingError(
            f"expected static, from_arg or from_args; for an object write static: {{...}}.{near}"
        )
    if len(kinds) > 1:
        raise _MappingError(f"it has {' and '.join(kinds)}; keep one")
    (kind,) = kinds
    for key in value:
        if key not in _KINDS[kind]:
            near = did_you_mean(closest(key, _KINDS[kind], count=1))
            raise _MappingError(f"no such key beside {kind}.{near}", key)
    if kind == "static":
        return Constant(value["static"])
    return _from_arg(value) if kind == "from_arg" else _from_args(value)


def _from_arg(value: Mapping[str, Any]) -> FromArg:
    name = value["from_arg"]
    if not isinstance(name, str) or not _PARAMETER.fullmatch(name):
        raise _MappingError("expected the name of an argument", "from_arg")
    default = (value["default"],) if "default" in value else ()
    return FromArg(name=name, default=default, transform=_transform(value))


def _transform(value: Mapping[str, Any]) -> Transform | None:
    use_context = value.get("use_context", False)
    if not isinstance(use_context, bool):
        raise _MappingError("expected true or false", "use_context")
    if "transform" not in value:
        if use_context:
            raise _MappingError("there is no transform that could use it", "use_context")
        return None
    if not isinstance(value["transform"], str):
        raise _MappingError('expected an expression, as "lambda x: x * 1000"', "transform")
    try:
        return compile_transform(value["transform"], use_context=use_context)
    except ExpressionError as error:
        raise _MappingError(str(error), "transform") from None


def _from_args(value: Mapping[str, Any]) -> FromArgs:
    names, defaults = value["from_args"], value.get("defaults", [])
    _check_names(names, "from_args")
    if not names:
        raise _MappingError("expected at least one name", "from_args")
    if not isinstance(defaults, list) or len(defaults) not in (0, len(names)):
        raise _MappingError(f"expected a list of {len(names)} values, one for each name", "defaults")
    return FromArgs(names=tuple(names), defaults=tuple(defaults))
