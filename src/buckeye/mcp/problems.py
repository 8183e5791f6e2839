"""Convert pydantic's errors in tasks, graders and actions to problems with key paths and plain messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from buckeye.config.problems import Problem, closest, did_you_mean
from buckeye.config.settings import KeyPath
from buckeye.config.shared import CONFLICT, BaseConfig

_MAX_VALUE_CHARS = 60
_OR_METADATA = "or a value of each task, such as '{metadata.NAME}'"
_EXPECTED = {
    "Grader.name": "expected at most 60 letters, digits, dots and hyphens",
    "ActionTable._tool": "expected the name of an MCP tool, or null to end the rollout",
    "HttpServer.url": "expected an address, such as http://localhost:8765/mcp",
    "positional": "expected a list of names",
    "transform": 'expected an expression, such as "lambda x: x * 1000"',
    "python": "expected a file and a function in it, such as check.py:grade",
    "sha256": f"expected 64 hexadecimal digits, {_OR_METADATA}",
    "number": f"expected a number, {_OR_METADATA}",
    "set": f"expected a list, {_OR_METADATA}",
    "rows": f"expected a list of rows, each a list, {_OR_METADATA}",
}


def collect_problems(model: type[BaseConfig], values: Any, error: ValidationError) -> list[Problem]:
    """Return all problems in a pydantic error, one per path.

    Each path leads to a key of `values`.
    """
    problems = [_problem(model, values, detail) for detail in error.errors(include_url=False)]
    return list({problem.path: problem for problem in problems}.values())


def format_value(value: Any) -> str:
    """Return a value as text for a message: the type of an object or list, or 60 characters of JSON."""
    if isinstance(value, Mapping | list):
        return "an object" if isinstance(value, Mapping) else "a list" if value else "an empty list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"


def _problem(model: type[BaseConfig], values: Any, error: ErrorDetails) -> Problem:
    kind, message = error["type"], error["msg"]
    path, owners = _locate(model, values, error["loc"], is_missing=kind == "missing")
    if kind == CONFLICT:
        context = error["ctx"]
        path_of_cause = (*path, *context["fields"][:1])
        code = "BK-CONFIG-VALUE" if path else "BK-CONFIG-CONFLICT"
        return Problem(path=path_of_cause, message=str(context["message"]), hint=context["hint"], code=code)
    if kind == "missing":
        return Problem(path=path, message="required", code="BK-CONFIG-MISSING")
    if kind == "extra_forbidden":
        known = dict.fromkeys(name for owner in owners for name in _fields(owner))
        hint = did_you_mean(closest(str(path[-1]), known)).strip() or f"use one of: {', '.join(known)}"
        return Problem(path=path, message="no such key", code="BK-CONFIG-UNKNOWN-KEY", hint=hint)
    if kind == "too_short":
        message = "must not be empty"
    message = re.sub(r" or instance of \w+$", "", message.replace("Input should be", "expected"))
    message = message.replace("a valid dictionary", "an object").replace("String should", "must")
    names = [str(path[-1]), *(f"{owner.__name__}.{path[-1]}" for owner in owners)] if path else []
    message = next((_EXPECTED[name] for name in names if name in _EXPECTED), message)
    return Problem(path=path, message=f"is {format_value(error['input'])}; {message}")


def _locate(
    model: type[BaseConfig], values: Any, location: Sequence[str | int], *, is_missing: bool
) -> tuple[KeyPath, list[type[BaseConfig]]]:
    """Return the path of an error in the values, and the classes that may have the field.

    Drop two parts of pydantic's location that are not in the values: the names of union members, and index 0
    for an item that the user wrote without a list.
    """
    path: KeyPath = ()
    owners = inner = [model]
    for depth, part in enumerate(location):
        container: Any = values if isinstance(values, Mapping | list) else {}  # a text has no items
        try:
            below = container[part]
        except (LookupError, TypeError):
            if is_missing and depth == len(location) - 1:
                return (*path, part), inner
            continue
        path, owners = (*path, part), inner
        classes = [kind for owner in owners for kind in _field_classes(owner, part, container)] or owners
        fitting = [kind for kind in classes if isinstance(below, Mapping) and _could_be(kind, below)]
        values, inner = below, fitting or classes
    return path, owners


def _field_classes(owner: type[BaseConfig], name: str | int, values: Any) -> list[type[BaseConfig]]:
    field = _fields(owner).get(str(name))
    # a table of actions has no `_tool`: its keys are names of actions
    others = get_type_hints(owner).get("__pydantic_extra__") if _could_be(owner, values) else None
    return _classes(others if field is None else field.annotation)


def _fields(owner: type[BaseConfig]) -> dict[str, FieldInfo]:
    """Return the fields of a class by the names that users write (alias first)."""
    return {field.alias or name: field for name, field in owner.model_fields.items()}


def _classes(annotation: Any) -> list[type[BaseConfig]]:
    """Return the configuration classes in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseConfig):
        return [annotation]
    return [kind for inner in get_args(annotation) for kind in _classes(inner)]


def _could_be(owner: type[BaseConfig], values: Mapping[str, Any]) -> bool:
    return all(name in values for name, field in _fields(owner).items() if field.is_required())
