"""Validate raw settings: make a configuration object, or list every problem."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from buckeye.config.problems import Problem, closest, conflict_problem, qualified, suggestion
from buckeye.config.settings import MISSING, KeyPath, Settings, dotted, flag_of
from buckeye.config.shared import CONFLICT, HAS_VARIABLE, BaseConfig
from buckeye.config.structure import Shape, fields_of, resolve, shape_at, shape_of, unknown_setting

T = TypeVar("T", bound=BaseConfig)

_MAX_SHOWN_CHARACTERS = 60


def validate(
    model: type[T], settings: Settings, resolve: Callable[[Settings], list[Problem]] | None = None
) -> tuple[T | None, list[Problem]]:
    """Return the configuration, or None if there are problems, and every problem.

    The function `resolve` completes the settings in place. Single values are checked before the call of
    `resolve`, and conflicts between settings after it.
    """
    config, errors = _validate(model, settings)
    problems = list(_bools_for_numbers(model, settings))
    if resolve is not None:
        values = [_problem(model, settings, error) for error in errors if error["type"] != CONFLICT]
        problems += [*resolve(settings), *values]
        config, errors = _validate(model, settings)
        errors = [error for error in errors if error["type"] == CONFLICT or not values]
    problems += [_problem(model, settings, error) for error in errors]
    return (None if problems else config), problems


def _validate(model: type[T], settings: Settings) -> tuple[T | None, list[ErrorDetails]]:
    try:
        return model.model_validate(settings.values), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _bools_for_numbers(model: type[BaseConfig], settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each boolean that pydantic would accept as a number."""
    for path, value in settings.leaves():
        shape = shape_at(model, path) if isinstance(value, bool) else None
        if shape is not None and shape.scalars and bool not in shape.scalars:
            yield _invalid_value(settings, path, value, shape)


def _problem(model: type[BaseConfig], settings: Settings, error: ErrorDetails) -> Problem:
    kind = error["type"]
    path, owner, shape = _locate(model, error["loc"])
    if kind == CONFLICT:
        return _conflict(settings, path, error["ctx"])
    if kind == "extra_forbidden":
        return _unknown_key(model, settings, path, owner)
    if kind == "missing":
        return _missing_value(settings, path, shape)
    if kind == "union_tag_invalid":
        path = (*path, "type")
        shape = shape.find("type") if shape is not None else None
    value = settings.get(path)
    if shape is None or value is MISSING:
        message = f"`{dotted(path)}` is not valid: {error['msg']}"
        return Problem(path=path, location=settings.location(path), message=message)
    if kind == HAS_VARIABLE:
        message = f"`{dotted(path)}` is {format_value(value)}, and variables are not replaced"
        hint = "write the path itself; `~` is the home directory"
        return Problem(path=path, location=settings.location(path), message=message, hint=hint)
    return _invalid_value(settings, path, value, shape)


def _locate(model: type[BaseConfig], loc: tuple[str | int, ...]) -> tuple[KeyPath, Shape, Shape | None]:
    """Return the path of an error, its section, and the expected shape (None: the setting does not exist).

    `loc` is pydantic's location of the error. In a union, `loc` also has the tag of the class.
    """
    path: KeyPath = ()
    owner = shape = shape_of(model)
    for part in loc:
        if len(shape.tables) > 1 and isinstance(part, str):
            shape = Shape(tables=tuple(t for t in shape.tables if part in fields_of(t)["type"].choices))
            continue
        owner = shape
        inner = shape.element if isinstance(part, int) else shape.find(part)
        if inner is None and not shape.tables:
            break
        path = (*path, part)
        if inner is None:
            return path, owner, None
        shape = inner
    return path, owner, shape


def _unknown_key(model: type[BaseConfig], settings: Settings, path: KeyPath, owner: Shape) -> Problem:
    """Return the problem of an unknown setting, or of a setting that belongs to another `type`."""
    location = settings.location(path)
    section = resolve(model, [str(key) for key in path[:-1]]).owner
    variants = [
        kind
        for table in section.tables
        if path[-1] in fields_of(table)
        for kind in fields_of(table)["type"].choices
    ]
    if not variants:
        return unknown_setting(model, path, location, owner)
    own = fields_of(owner.tables[0])["type"].choices[0]
    key, type_key = dotted(path), dotted((*path[:-1], "type"))
    return Problem(
        path=path,
        location=location,
        message=f"`{key}` has no effect with `{type_key}` = {own}; it belongs to {', '.join(variants)}",
        hint=f"set `{type_key}`, or leave `{key}` out",
        code="BK-CONFIG-CONFLICT",
    )


def _missing_value(settings: Settings, path: KeyPath, shape: Shape | None) -> Problem:
    flag, hint = flag_of(path), None
    if shape is not None and shape.tables:
        fields = [item for table in shape.tables for item in table.model_fields.items()]
        required = [f"{flag_of((*path, name))} VALUE" for name, info in fields if info.is_required()]
        values = " ".join(required) or f"{flag}.NAME VALUE"
        message = f"`{dotted(path)}` requires settings"
        hint = f"name a file, `{flag} @ FILE.toml`, or set values: `{values}`"
    else:
        message = f"`{dotted(path)}` requires a value"
        hint = f"set it in a file, or with `{flag} VALUE`"
    return Problem(
        path=path,
        location=settings.locations.get(path[:-1]),
        message=message,
        hint=hint if settings.has_flags else None,
        code="BK-CONFIG-MISSING",
    )


def _conflict(settings: Settings, section: KeyPath, context: dict[str, Any]) -> Problem:
    names = {name: (*section, *map(_key, name.split("."))) for name in context["fields"]}
    hint = qualified(context["hint"], names) if context["hint"] else None
    message = qualified(context["message"], names)
    present = [path for path in names.values() if len(names) == 1 or settings.has(path)]
    paths = present or [*names.values(), section][:1]
    places = [(path, settings.location(path)) for path in paths]
    return conflict_problem(places, message, hint=hint, code=context["code"])


def _key(part: str) -> str | int:
    return int(part) if part.isdigit() else part


def _invalid_value(settings: Settings, path: KeyPath, value: Any, shape: Shape) -> Problem:
    message = f"`{dotted(path)}` is {format_value(value)}; expected {shape.expected()}"
    hint = suggestion(closest(value, map(str, shape.choices))) if isinstance(value, str) else None
    if isinstance(value, dict) and shape.element is not None and shape.element.tables:
        hint = f"begin each section with `[[{dotted(path)}]]`"
    return Problem(path=path, location=settings.location(path), message=message, hint=hint)


def format_value(value: Any) -> str:
    """Return a value as text, shortened for a message."""
    if value is None:
        return "None"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list) and not value:
        return "an empty list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"
