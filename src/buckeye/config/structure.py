"""Describe the fields and allowed values of configuration classes, for flags, messages and help."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from buckeye.config.problems import Problem, closest, suggestion
from buckeye.config.settings import KeyPath, Layer, Location, Settings, dotted, flag_of
from buckeye.config.shared import BaseConfig

_SCALARS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
_MAX_LISTED_NAMES = 12


@dataclass(frozen=True, slots=True)
class Shape:
    """Allowed values of a field.

    A value is one of these:

    - a section of a class in `tables`. If there are several classes, `type` selects one.
    - a list, whose items have the shape `element`
    - a table with any names, and values of type `free`
    - one of `choices`
    - a value of a type in `scalars`, within `bounds` such as ">= 1"
    - None, if `optional`
    """

    tables: tuple[type[BaseConfig], ...] = ()
    element: Shape | None = None
    free: type | None = None
    choices: tuple[Any, ...] = ()
    scalars: frozenset[type] = frozenset()
    bounds: tuple[str, ...] = ()
    optional: bool = False

    @property
    def is_flag(self) -> bool:
        """True if only a boolean is allowed."""
        return self.scalars == {bool} and not (self.tables or self.element or self.choices)

    def find(self, name: str) -> Shape | None:
        """Return the allowed values of field `name` in any of its tables, or None."""
        shapes = dict.fromkeys(fields_of(table)[name] for table in self.tables if name in fields_of(table))
        return _union(list(shapes)) if shapes else None

    def expected(self) -> str:
        """Return the allowed values as text."""
        if self.element is not None:
            text = "a list of sections" if self.element.tables else f"a list, each {self.element.expected()}"
        elif self.choices:
            choices = ("true", "false", *self.choices) if bool in self.scalars else self.choices
            text = "one of " + ", ".join(map(str, choices))
        elif self.tables:
            text = "a section"
        elif self.free is not None:
            text = "a table of names and values"
        else:
            text = " or ".join(_SCALARS[kind] for kind in _SCALARS if kind in self.scalars)
        bounds = f" {' and '.join(self.bounds)}" if self.bounds else ""
        return f"{text}{bounds}{', or None' if self.optional else ''}"


@cache
def fields_of(model: type[BaseConfig]) -> Mapping[str, Shape]:
    """Return the allowed values of the fields of a class, by name."""
    return {name: _field_shape(info) for name, info in model.model_fields.items()}


def shape_of(model: type[BaseConfig]) -> Shape:
    """Return the shape of a section with the class `model`."""
    return Shape(tables=(model,))


def shape_at(model: type[BaseConfig], path: KeyPath) -> Shape | None:
    """Return the allowed values at a path, or None if the setting does not exist."""
    shape: Shape | None = shape_of(model)
    for key in path:
        if shape is not None:
            shape = shape.element if isinstance(key, int) else shape.find(key)
    return shape


def paths_of(model: type[BaseConfig], under: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all settings, each section before its settings.

    In a path, the index 0 means every index of a list.
    """
    for name, shape in fields_of(model).items():
        path = (*under, name)
        yield path
        inner = shape.element if shape.element is not None else shape
        if shape.element is not None and inner.tables:
            path = (*path, 0)
        for table in inner.tables:
            yield from paths_of(table, path)


@dataclass(frozen=True, slots=True)
class Target:
    """Setting that a dotted name refers to.

    If the setting does not exist, `shape` is None, `path` ends with the unknown part, and `owner` is the
    section that lacks this part.
    """

    path: KeyPath
    shape: Shape | None
    owner: Shape


def resolve(model: type[BaseConfig], parts: Sequence[str]) -> Target:
    """Return the setting that the parts of a dotted name refer to. In a part, `-` counts as `_`."""
    path: KeyPath = ()
    shape = shape_of(model)
    for i, part in enumerate(parts):
        owner = shape
        if shape.free is not None:
            # Arguments of functions have no dash. Names in tables of texts, such as headers, may have one.
            rest = parts[i:] if shape.free is str else [name.replace("-", "_") for name in parts[i:]]
            scalars = frozenset({str}) if shape.free is str else frozenset[type]()
            return Target((*path, *rest), Shape(scalars=scalars), owner)
        inner, key = _find_part(shape, part)
        path = (*path, key)
        if inner is None:
            return Target(path, None, owner)
        shape = inner
    return Target(path, shape, shape)


def drop_unknown(shape: Shape, value: Any) -> None:
    """Delete settings that do not exist from raw values, in place."""
    if isinstance(value, list) and shape.element is not None:
        for item in value:
            drop_unknown(shape.element, item)
    elif isinstance(value, dict) and shape.tables:
        for name in list(value):
            inner = shape.find(name)
            if inner is None:
                del value[name]
            else:
                drop_unknown(inner, value[name])


def replace_none_texts(settings: Settings, model: type[BaseConfig]) -> None:
    """Replace the text "None" by None in place, where a setting can be None."""
    for path, value in list(settings.leaves()):
        if value == "None" and (shape := shape_at(model, path)) is not None and shape.optional:
            settings.get(path[:-1])[path[-1]] = None


def unknown_setting(
    model: type[BaseConfig], path: KeyPath, location: Location | None, owner: Shape
) -> Problem:
    """Return the problem of a setting that does not exist. `owner` is the section that lacks the setting."""
    name = str(path[-1])
    if not owner.tables:
        parent = dotted(path[:-1])
        message = f"`{parent}` is not a section, so it has no setting `{name}`"
        hint = f"set `{parent}` to {owner.expected()}"
        if owner.element is not None and owner.element.tables:
            message = f"`{parent}` is a list of sections, so it has no setting `{name}`"
            hint = f"name an entry by its number: `{flag_of((*path[:-1], 0, name))}`"
    else:
        message = f"no setting `{dotted(path)}`"
        is_flag = location is not None and location.layer is Layer.FLAG
        known = list(dict.fromkeys(key for table in owner.tables for key in fields_of(table)))
        near = closest(name, known)
        names = [flag_of((*path[:-1], key)) for key in near] if is_flag else near
        if not names:
            names = [flag_of(p) if is_flag else dotted(p) for p in _similar_settings(model, name)]
        hidden = len(known) - _MAX_LISTED_NAMES
        more = f", or {hidden} more (--help-all)" if hidden > 0 else ""
        hint = suggestion(names) or f"use one of {', '.join(known[:_MAX_LISTED_NAMES])}{more}"
    return Problem(path=path, location=location, message=message, hint=hint, code="BK-CONFIG-UNKNOWN-KEY")


def _field_shape(info: FieldInfo) -> Shape:
    shape = _shape(info.annotation)
    return replace(shape, bounds=shape.bounds + _bounds(info.metadata)) if info.metadata else shape


def _shape(annotation: Any) -> Shape:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        shape = _shape(args[0])
        return replace(shape, bounds=shape.bounds + _bounds(args[1:]))
    if origin in (Union, types.UnionType):
        return _union([_shape(arg) for arg in args])
    if origin is Literal:
        return Shape(choices=args)
    if origin is list:
        return Shape(element=_shape(args[0]))
    if origin is dict:
        return Shape(free=args[1] if isinstance(args[1], type) else object)
    if annotation is type(None):
        return Shape(optional=True)
    if isinstance(annotation, type) and issubclass(annotation, BaseConfig):
        return Shape(tables=(annotation,))
    return Shape(scalars=frozenset({annotation}))


def _union(parts: list[Shape]) -> Shape:
    """Return one shape that allows the values of all parts."""
    return Shape(
        tables=tuple(table for part in parts for table in part.tables),
        element=next((part.element for part in parts if part.element), None),
        free=next((part.free for part in parts if part.free), None),
        choices=tuple(choice for part in parts for choice in part.choices),
        scalars=frozenset().union(*(part.scalars for part in parts)),
        bounds=tuple(bound for part in parts for bound in part.bounds),
        optional=any(part.optional for part in parts),
    )


def _bounds(metadata: Any) -> tuple[str, ...]:
    bounds = []
    for constraint in metadata:
        parts = constraint.metadata if isinstance(constraint, FieldInfo) else (constraint,)
        for part in parts:
            bounds += [f"{sign} {getattr(part, name):g}" for name, sign in _BOUNDS if hasattr(part, name)]
    return tuple(bounds)


def _find_part(shape: Shape, part: str) -> tuple[Shape | None, str | int]:
    if shape.element is not None and shape.element.tables:
        is_index = part.isascii() and part.isdigit() and len(part) < 4
        return (shape.element, int(part)) if is_index else (None, part)
    name = part.replace("-", "_")
    return shape.find(name), name


def _similar_settings(model: type[BaseConfig], name: str) -> list[KeyPath]:
    """Return settings with this name or a similar one in any section. Those near the root come first."""
    paths = list(dict.fromkeys(paths_of(model)))
    near = closest(name, [str(path[-1]) for path in paths], count=1)
    return sorted((path for path in paths if path[-1] in near), key=len)[:3]
