"""Structure of the configuration classes, for flags, messages, help and schemas."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from buckeye.config.problems import Problem, closest, did_you_mean
from buckeye.config.settings import KeyPath, Layer, Location, Settings, dotted, flag_of
from buckeye.config.shared import BaseConfig

_SCALARS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))

_LISTED_NAMES = 12


@dataclass(frozen=True, slots=True)
class Shape:
    """Allowed values of a field: tables (several classes are distinguished by `type`), a list of `element`, a
    free table with values of type `free`, one of `choices`, or a value of one of the types `scalars`; also
    None if `optional`. `bounds` are limits such as ">= 1".
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
        """True if it is a boolean and nothing else."""
        return self.scalars == {bool} and not (self.tables or self.element or self.choices)

    def find(self, name: str) -> Shape | None:
        """Return the allowed values of field `name` in any of its tables, or None."""
        found = dict.fromkeys(fields_of(table)[name] for table in self.tables if name in fields_of(table))
        return _union(list(found)) if found else None

    def expected(self) -> str:
        """Return the allowed values as text."""
        if self.element is not None:
            words = "a list of sections" if self.element.tables else f"a list, each {self.element.expected()}"
        elif self.choices:
            words = "one of " + ", ".join(map(str, self.choices))
        elif self.tables:
            words = "a section (settings of its own)"
        elif self.free is not None:
            words = "a table of names and values"
        else:
            words = " or ".join(_SCALARS[t] for t in _SCALARS if t in self.scalars)
        return words + "".join(f" {b}" for b in self.bounds) + (", or None" if self.optional else "")


@cache
def fields_of(model: type[BaseConfig]) -> Mapping[str, Shape]:
    """Return the fields of a class, by name."""
    return {name: _field_shape(info) for name, info in model.model_fields.items()}


def shape_of(model: type[BaseConfig]) -> Shape:
    """Return the shape of a section of this class."""
    return Shape(tables=(model,))


def shape_at(model: type[BaseConfig], path: KeyPath) -> Shape | None:
    """Return the allowed values at a path, or None if the setting does not exist."""
    shape: Shape | None = shape_of(model)
    for key in path:
        if shape is not None:
            shape = shape.element if isinstance(key, int) else shape.find(key)
    return shape


def paths_of(model: type[BaseConfig], under: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all settings, sections before their content; index 0 represents all entries of a
    list.
    """
    for name, shape in fields_of(model).items():
        path = (*under, name)
        yield path
        inner = shape.element if shape.element is not None else shape
        if shape.element is not None and inner.tables:
            path = (*path, 0)
        for table in inner.tables:
            yield from paths_of(table, path)


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


# Names as users write them, resolved to fields.


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a dotted name. If the setting does not exist, `shape` has the value None, `path` ends with
    the unknown part, and `owner` is the section that lacks it.
    """

    path: KeyPath
    shape: Shape | None
    owner: Shape


def resolve(model: type[BaseConfig], words: Sequence[str]) -> Target:
    """Resolve the parts of a dotted name, with - or _, from the root of a configuration."""
    path: KeyPath = ()
    shape = shape_of(model)
    for i, word in enumerate(words):
        owner = shape
        if shape.free is not None:
            # Argument names have no dash; names of, for example, headers stay unchanged.
            rest = words[i:] if shape.free is str else [w.replace("-", "_") for w in words[i:]]
            scalars = frozenset({str}) if shape.free is str else frozenset[type]()
            return Target((*path, *rest), Shape(scalars=scalars), owner)
        found, key = _step(shape, word)
        path = (*path, key)
        if found is None:
            return Target(path, None, owner)
        shape = found
    return Target(path, shape, shape)


def _step(shape: Shape, word: str) -> tuple[Shape | None, str | int]:
    if shape.element is not None and shape.element.tables:
        is_index = word.isascii() and word.isdigit() and len(word) < 4
        return (shape.element, int(word)) if is_index else (None, word)
    name = word.replace("-", "_")
    return shape.find(name), name


def drop_unknown(shape: Shape, value: Any) -> None:
    """Delete settings that do not exist from raw values, in place."""
    if isinstance(value, list) and shape.element is not None:
        for item in value:
            drop_unknown(shape.element, item)
    elif isinstance(value, dict) and shape.tables:
        for name in list(value):
            found = shape.find(name)
            if found is None:
                del value[name]
            else:
                drop_unknown(found, value[name])


def replace_none_texts(settings: Settings, model: type[BaseConfig]) -> None:
    """Replace the text "None" by None in place, where a setting can be None."""
    for path, value in list(settings.leaves()):
        if value == "None" and (shape := shape_at(model, path)) is not None and shape.optional:
            settings.get(path[:-1])[path[-1]] = None


def unknown_setting(
    model: type[BaseConfig], path: KeyPath, location: Location | None, owner: Shape
) -> Problem:
    """Return the problem of a setting that does not exist; `owner` is the section that lacks it."""
    name = str(path[-1])
    if not owner.tables:
        within = dotted(path[:-1])
        message = f"{within} is {owner.expected()}, so it has no {name}."
        return Problem(path=path, location=location, message=message)
    flags = location is not None and location.layer is Layer.FLAG
    known = list(dict.fromkeys(key for table in owner.tables for key in fields_of(table)))
    here = closest(name, known)
    names = [flag_of((*path[:-1], near)) for near in here] if flags else here
    if not names:
        elsewhere = _elsewhere(model, name)
        names = [flag_of(p) if flags else dotted(p) for p in elsewhere]
    more = f" and {len(known) - _LISTED_NAMES} more (--help-all)" if len(known) > _LISTED_NAMES else ""
    hint = did_you_mean(names) or f" This section has {', '.join(known[:_LISTED_NAMES])}{more}."
    return Problem(path=path, location=location, message=f"no such setting.{hint}")


def _elsewhere(model: type[BaseConfig], name: str) -> list[KeyPath]:
    """Return settings with that name, or a similar one, in other sections; those near the root first."""
    paths = list(dict.fromkeys(paths_of(model)))
    near = closest(name, [str(path[-1]) for path in paths], count=1)
    return sorted((path for path in paths if path[-1] in near), key=len)[:3]
