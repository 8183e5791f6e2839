"""Readable problems of tasks, graders and actions, made from pydantic's errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from buckeye.config.problems import Problem, closest, did_you_mean
from buckeye.config.settings import KeyPath
from buckeye.config.shared import CONFLICT, BaseConfig

_LONGEST_VALUE = 60
_OR_OF_TASK = "or what each task has for it, as '{metadata.NAME}'"
_EXPECTED = {
    "Grader.name": "expected at most 60 letters, digits, dots and hyphens",
    "ActionTable._tool": "expected the name of an MCP tool, or null to end the rollout",
    "HttpServer.url": "expected an address, as http://localhost:8765/mcp",
    "positional": "expected a list of names",
    "transform": 'expected an expression, as "lambda x: x * 1000"',
    "python": "expected a file and a function in it, as check.py:grade",
    "sha256": f"expected 64 hexadecimal digits, {_OR_OF_TASK}",
    "number": f"expected a number, {_OR_OF_TASK}",
    "set": f"expected a list, {_OR_OF_TASK}",
    "rows": f"expected a list of rows, each a list, {_OR_OF_TASK}",
}


def collect_problems(model: type[BaseConfig], values: Any, error: ValidationError) -> list[Problem]:
    """Return all problems in a pydantic error, one per path.

    The paths are those of `values`. Messages have no trailing period.
    """
    found = [_problem(model, values, one) for one in error.errors(include_url=False)]
    return list({problem.path: problem for problem in found}.values())


def format_value(value: Any) -> str:
    """Return a value as messages show it: objects and lists by type, others as JSON, cut at 60 characters."""
    if isinstance(value, Mapping | list):
        return "an object" if isinstance(value, Mapping) else "a list" if value else "an empty list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _problem(model: type[BaseConfig], values: Any, error: ErrorDetails) -> Problem:
    kind, message = error["type"], error["msg"]
    path, owners = _located(model, values, error["loc"], is_missing=kind == "missing")
    if kind == CONFLICT:
        return Problem(path=(*path, *error["ctx"]["fields"][:1]), message=str(error["ctx"]["message"]))
    if kind == "missing":
        return Problem(path=path, message="required")
    if kind == "extra_forbidden":
        known = dict.fromkeys(name for owner in owners for name in _fields(owner))
        near = did_you_mean(closest(str(path[-1]), known)) or f" There are: {', '.join(known)}"
        return Problem(path=path, message=f"no such key.{near}")
    if kind == "too_short":
        message = "must not be empty"
    message = message.replace("Input should be", "expected").replace("valid dictionary", "object")
    message = message.replace("String should", "must")
    names = [str(path[-1]), *(f"{owner.__name__}.{path[-1]}" for owner in owners)] if path else []
    message = next((_EXPECTED[name] for name in names if name in _EXPECTED), message)
    return Problem(path=path, message=f"is {format_value(error['input'])}; {message}")


def _located(
    model: type[BaseConfig], values: Any, location: Sequence[str | int], *, is_missing: bool
) -> tuple[KeyPath, list[type[BaseConfig]]]:
    """Return the path of an error in the values, and the classes that may have the field.

    pydantic's location also contains the names of union members, and an index for a single item that replaces
    a list of one. Both are dropped.
    """
    path: KeyPath = ()
    owners = inner = [model]
    for depth, part in enumerate(location):
        try:
            below = values[part]
        except (LookupError, TypeError):
            if is_missing and depth == len(location) - 1:
                return (*path, part), inner
            continue
        path, owners = (*path, part), inner
        of_field = [one for owner in owners for one in _classes_of_field(owner, part)]
        fitting = [one for one in of_field or owners if isinstance(below, Mapping) and _could_be(one, below)]
        values, inner = below, fitting or of_field or owners
    return path, owners


def _classes_of_field(owner: type[BaseConfig], name: str | int) -> list[type[BaseConfig]]:
    field = _fields(owner).get(str(name))
    others = get_type_hints(owner).get("__pydantic_extra__")
    return _classes(others if field is None else field.annotation)


def _fields(owner: type[BaseConfig]) -> dict[str, FieldInfo]:
    """Return the fields of a class by the names that users write (alias first)."""
    return {field.alias or name: field for name, field in owner.model_fields.items()}


def _classes(annotation: Any) -> list[type[BaseConfig]]:
    """Return the configuration classes in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseConfig):
        return [annotation]
    return [one for inner in get_args(annotation) for one in _classes(inner)]


def _could_be(owner: type[BaseConfig], values: Mapping[str, Any]) -> bool:
    return all(name in values for name, field in _fields(owner).items() if field.is_required())
