"""From names as people write them to those of the fields."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from buckeye.config.base import BaseConfig
from buckeye.config.problems import Problem, closest, did_you_mean
from buckeye.config.settings import MISSING, KeyPath, Layer, Place, Settings, dotted, flag_of
from buckeye.config.structure import Shape, fields_of, paths_of, shape_of

_HIGHEST_INDEX_DIGITS = 3
_LISTED_NAMES = 12


@dataclass(frozen=True, slots=True)
class Target:
    """What a dotted name leads to. `shape` is None if there is no such setting; `path` then ends with the
    part that is not known, and `owner` is where it was looked up."""

    path: KeyPath
    shape: Shape | None
    owner: Shape


def resolve(model: type[BaseConfig], words: Sequence[str]) -> Target:
    """Follow the parts of a dotted name, in which - may stand for _, from the root of a configuration."""
    path: KeyPath = ()
    shape = shape_of(model)
    for i, word in enumerate(words):
        owner = shape
        if shape.free is not None:
            # Names of arguments have no dash; names of, say, headers are kept as they are.
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
        is_index = word.isascii() and word.isdigit() and len(word) <= _HIGHEST_INDEX_DIGITS
        return (shape.element, int(word)) if is_index else (None, word)
    name = canonical_name(shape, word.replace("-", "_"))
    return shape.find(name), name


def canonical_name(shape: Shape, name: str) -> str:
    """The field that `name` means in these tables: the name itself unless it is an alias."""
    return next((table.aliases[name] for table in shape.tables if name in table.aliases), name)


def use_field_names(settings: Settings, model: type[BaseConfig]) -> list[Problem]:
    """Replace aliases by the names of the fields and the text "None" by None, in place.

    Returns the settings that are there under two names with two values.
    """
    return list(_in_table(settings, (), shape_of(model)))


def _in_table(settings: Settings, path: KeyPath, shape: Shape) -> Iterator[Problem]:
    for name in list(settings.get(path)):
        field = canonical_name(shape, name)
        if field != name:
            yield from _rename(settings, path, name, field)
        found = shape.find(field)
        if found is not None:
            yield from _in_value(settings, (*path, field), found)


def _in_value(settings: Settings, path: KeyPath, shape: Shape) -> Iterator[Problem]:
    value = settings.get(path)
    if value == "None" and shape.optional:
        settings.get(path[:-1])[path[-1]] = None
    elif isinstance(value, dict) and shape.tables:
        yield from _in_table(settings, path, shape)
    elif isinstance(value, list) and shape.element is not None:
        for i in range(len(value)):
            yield from _in_value(settings, (*path, i), shape.element)


def _rename(settings: Settings, table: KeyPath, old: str, new: str) -> Iterator[Problem]:
    value, other = settings.get((*table, old)), settings.get((*table, new))
    if other is MISSING or other == value:
        settings.rename(table, old, new)
        return
    del settings.get(table)[old]
    place = settings.place((*table, new))
    there = f" ({place.text})" if place is not None else ""
    yield Problem(
        path=(*table, old),
        place=settings.place((*table, old)),
        message=f"another name of {dotted((*table, new))}, which is set too{there}. Keep one of the two.",
    )


def unknown_setting(model: type[BaseConfig], path: KeyPath, place: Place | None, owner: Shape) -> Problem:
    """The problem of a setting that does not exist; `owner` is the section it was looked up in."""
    name = str(path[-1])
    if not owner.tables:
        within = dotted(path[:-1])
        message = f"{within} is {owner.expected()}, so it has no {name}."
        return Problem(path=path, place=place, message=message)
    flags = place is not None and place.layer is Layer.FLAG
    here = closest(name, _names(owner))
    names = [flag_of((*path[:-1], near)) for near in here] if flags else here
    if not names:
        elsewhere = _elsewhere(model, name)
        names = [flag_of(p) if flags else dotted(p) for p in elsewhere]
    hint = did_you_mean(names) or _what_there_is(owner)
    return Problem(path=path, place=place, message=f"no such setting.{hint}")


def _names(owner: Shape) -> list[str]:
    return [name for table in owner.tables for name in (*fields_of(table), *table.aliases)]


def _elsewhere(model: type[BaseConfig], name: str) -> list[KeyPath]:
    """Settings of that name, or of one much like it, in other sections; those near the root first."""
    paths = list(dict.fromkeys(paths_of(model)))
    names = {str(path[-1]) for path in paths}
    wanted = name.replace("-", "_")
    near = [wanted] if wanted in names else difflib.get_close_matches(wanted, names, n=1, cutoff=0.8)
    return sorted((path for path in paths if path[-1] in near), key=len)[:3]


def _what_there_is(owner: Shape) -> str:
    names = list(dict.fromkeys(_names(owner)))
    more = f" and {len(names) - _LISTED_NAMES} more (--help-all)" if len(names) > _LISTED_NAMES else ""
    return f" This section has {', '.join(names[:_LISTED_NAMES])}{more}."
