"""Validation of raw settings: the result is a configuration object, or every problem."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from buckeye.config.problems import Problem, closest, did_you_mean
from buckeye.config.settings import MISSING, KeyPath, Settings, dotted, flag_of
from buckeye.config.shared import CONFLICT, BaseConfig
from buckeye.config.structure import Shape, fields_of, resolve, shape_at, shape_of, unknown_setting

T = TypeVar("T", bound=BaseConfig)
_LONGEST_VALUE = 60


def validate(
    model: type[T], settings: Settings, resolve: Callable[[Settings], list[Problem]] | None = None
) -> tuple[T | None, list[Problem]]:
    """Return the configuration (None if there are problems), and every problem.

    `resolve` completes the settings in place, after each value is checked where it was written, and before
    settings are checked against each other.
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
            yield _wrong_value(settings, path, value, shape)


def _problem(model: type[BaseConfig], settings: Settings, error: ErrorDetails) -> Problem:
    kind = error["type"]
    path, owner, shape = _locate(model, error["loc"])
    if kind == CONFLICT:
        return _conflict(settings, path, error["ctx"])
    if kind == "extra_forbidden":
        return _unknown(model, settings, path, owner)
    if kind == "missing":
        return Problem(path=path, location=settings.locations.get(path[:-1]), message=_required(path, shape))
    if kind == "union_tag_invalid":
        path = (*path, "type")
        shape = shape.find("type") if shape is not None else None
    value = settings.get(path)
    if shape is None or value is MISSING:
        return Problem(path=path, location=settings.location(path), message=f"{error['msg']}.")
    return _wrong_value(settings, path, value, shape)


def _locate(model: type[BaseConfig], loc: tuple[str | int, ...]) -> tuple[KeyPath, Shape, Shape | None]:
    """Return the path of an error, its section, and the expected shape (None: the setting does not exist).

    In a union, pydantic's location also contains the variant's tag.
    """
    path: KeyPath = ()
    owner = shape = shape_of(model)
    for part in loc:
        if len(shape.tables) > 1 and isinstance(part, str):
            shape = Shape(tables=tuple(t for t in shape.tables if part in fields_of(t)["type"].choices))
            continue
        owner = shape
        found = shape.element if isinstance(part, int) else shape.find(part)
        if found is None and not shape.tables:
            break
        path = (*path, part)
        if found is None:
            return path, owner, None
        shape = found
    return path, owner, shape


def _unknown(model: type[BaseConfig], settings: Settings, path: KeyPath, owner: Shape) -> Problem:
    """Return the problem of a setting that does not exist, or only in another variant of the section."""
    location = settings.location(path)
    section = resolve(model, [str(key) for key in path[:-1]]).owner
    others = [
        kind
        for table in section.tables
        if path[-1] in fields_of(table)
        for kind in fields_of(table)["type"].choices
    ]
    if not others:
        return unknown_setting(model, path, location, owner)
    own = fields_of(owner.tables[0])["type"].choices[0]
    message = f"only with {dotted((*path[:-1], 'type'))} = {' or '.join(others)}, and it is {own}."
    return Problem(path=path, location=location, message=message)


def _required(path: KeyPath, shape: Shape | None) -> str:
    flag = flag_of(path)
    if shape is not None and shape.tables:
        needed = [
            name for table in shape.tables for name, info in table.model_fields.items() if info.is_required()
        ]
        settings = "".join(f", at least {flag}.{name.replace('_', '-')}" for name in needed)
        return f"required: give it a file ({flag} @ FILE.toml), or settings of its own{settings}."
    return f"required: set it with {flag}, or in a file."


def _conflict(settings: Settings, section: KeyPath, context: dict[str, Any]) -> Problem:
    paths = [(*section, *map(_key, name.split("."))) for name in context["fields"]]
    if len(paths) == 1:
        return Problem(path=paths[0], location=settings.location(paths[0]), message=f"{context['message']}.")
    locations = [f"{dotted(path)}: {_where(settings, path)}" for path in paths]
    return Problem(path=section, message=f"{context['message']}.\n  {', '.join(locations)}")


def _key(part: str) -> str | int:
    return int(part) if part.isdigit() else part


def _where(settings: Settings, path: KeyPath) -> str:
    location = settings.location(path) if settings.get(path) is not MISSING else None
    return location.text if location is not None else "by default"


def _wrong_value(settings: Settings, path: KeyPath, value: Any, shape: Shape) -> Problem:
    near = closest(value, map(str, shape.choices)) if isinstance(value, str) else []
    message = f"is {_shown(value)}; expected {shape.expected()}.{did_you_mean(near)}"
    return Problem(path=path, location=settings.location(path), message=message)


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list) and not value:
        return "an empty list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
