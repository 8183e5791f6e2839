"""Raw settings: nested dicts and lists before validation, with the file line or flag of every value."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

KeyPath = tuple[str | int, ...]
"""Keys from the root to a value. An int is a list index."""


class Layer(IntEnum):
    """Source of a value. A higher layer takes precedence."""

    DEFAULT = 0
    FILE = 1
    FLAG = 2


@dataclass(frozen=True, slots=True)
class Location:
    """File line or flag that sets a value, such as `train.toml:7` or `--max-steps`."""

    text: str
    layer: Layer


BY_DEFAULT = Location("by default", Layer.DEFAULT)


class _Missing:
    """Type of MISSING, which means that a setting has no value."""


MISSING: Final = _Missing()


def dotted(path: Iterable[str | int]) -> str:
    """Return a path as dotted text: `trainer.optim.lr`."""
    return ".".join(map(str, path))


def flag_of(path: Iterable[str | int]) -> str:
    """Return the flag that sets the value at `path`."""
    return "--" + dotted(path).replace("_", "-")


@dataclass(slots=True)
class Settings:
    """Values of settings as nested dicts, lists and scalars, and the locations of some paths.

    `has_flags` is False if flags cannot set these settings.
    """

    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[KeyPath, Location] = field(default_factory=dict)
    has_flags: bool = True

    def get(self, path: KeyPath) -> Any:
        """Return the value at `path`, or MISSING."""
        value: Any = self.values
        for key in path:
            if not _has(value, key):
                return MISSING
            value = value[key]
        return value

    def has(self, path: KeyPath) -> bool:
        """Return True if `path` has a value."""
        return self.get(path) is not MISSING

    def location(self, path: KeyPath) -> Location | None:
        """Return the location of the value at `path`.

        If it is unknown, return the location of a value inside, or else of a section that contains `path`.
        """
        if path and path not in self.locations and (inside := self._below(path)):
            return self.locations[inside[0]]
        for length in range(len(path), 0, -1):
            if (location := self.locations.get(path[:length])) is not None:
                return location
        return None

    def put(self, path: KeyPath, value: Any, location: Location) -> None:
        """Write `value` to `path`. If `path` and `value` are tables, merge them.

        The last key of `path` is a key of a table, or an index of a list. If the index equals the length of
        the list, append `value`.
        """
        self._merge(path, value, {(): location})

    def merge(self, other: Settings, at: KeyPath = ()) -> None:
        """Merge `other` into these settings, table by table. The values of `other` take precedence."""
        self._merge(at, other.values, other.locations)

    def _merge(self, at: KeyPath, value: Any, locations: Mapping[KeyPath, Location]) -> None:
        present = self.get(at)
        if isinstance(value, dict) and isinstance(present, dict):
            if () in locations:
                self.locations.setdefault(at, locations[()])
            for key, item in value.items():
                self._merge((*at, key), item, _under(locations, key))
            return
        if present is not MISSING:
            for path in self._below(at):
                del self.locations[path]
        if at:
            _assign(self._parent(at), at[-1], deepcopy(value))
        else:
            self.values = deepcopy(value)
        self.locations.update({at + path: location for path, location in locations.items()})

    def _parent(self, path: KeyPath) -> Any:
        """Return the table or list that contains `path`.

        Missing tables and lists are created. They replace values of another type.
        """
        parent: Any = self.values
        for key, following in itertools.pairwise(path):
            child = parent[key] if _has(parent, key) else None
            if not isinstance(child, list if isinstance(following, int) else dict):
                child = [] if isinstance(following, int) else {}
                _assign(parent, key, child)
            parent = child
        return parent

    def _below(self, path: KeyPath) -> list[KeyPath]:
        return [p for p in self.locations if p[: len(path)] == path]

    def leaves(self) -> Iterator[tuple[KeyPath, Any]]:
        """Yield every value that is neither a table nor a list, with its path."""
        yield from _leaves((), self.values)


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves((*path, key), item)
    else:
        yield path, value


def _under(locations: Mapping[KeyPath, Location], key: str) -> dict[KeyPath, Location]:
    """Return the locations under one key of a table. Without a location, the key gets that of the table."""
    inherited = {(): locations[()]} if () in locations else {}
    return inherited | {path[1:]: location for path, location in locations.items() if path[:1] == (key,)}


def _has(parent: Any, key: str | int) -> bool:
    if isinstance(parent, list):
        return isinstance(key, int) and key < len(parent)
    return isinstance(parent, dict) and key in parent


def _assign(parent: Any, key: str | int, value: Any) -> None:
    if isinstance(parent, list) and key == len(parent):
        parent.append(value)
    else:
        parent[key] = value
