"""Settings before validation: a tree whose leaves remember where they were written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value and its place: `train.toml:4`, `--max-steps`, `$PRIME_MAX_STEPS`. `rank` orders the kinds of
    places: what is set on the command line (2) beats files (1), which beat the environment (0)."""

    value: Any
    place: str
    rank: int


Node: TypeAlias = "dict[str, Node] | list[Node] | Leaf"
Path: TypeAlias = tuple[str, ...]


def plain(node: Node) -> Any:
    """The tree as plain values."""
    if isinstance(node, Leaf):
        return node.value
    if isinstance(node, list):
        return [plain(item) for item in node]
    return {key: plain(value) for key, value in node.items()}


def merge(base: Node, over: Node) -> Node:
    """Deep merge; `over` wins. Tables merge key by key; a table of numbers (`env.0.id`) merges into a
    list."""
    if isinstance(base, list) and isinstance(over, dict) and over and all(key.isdigit() for key in over):
        return _merge_into_list(base, over)
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    merged = dict(base)
    for key, value in over.items():
        merged[key] = merge(merged[key], value) if key in merged else value
    return merged


def _merge_into_list(base: list[Node], over: Mapping[str, Node]) -> list[Node]:
    merged = list(base)
    for key in sorted(over, key=int):
        index = int(key)
        if index < len(merged):
            merged[index] = merge(merged[index], over[key])
        else:
            merged.append(over[key])
    return merged


def nest(path: Sequence[str], node: Node) -> Node:
    """`node` under a path of keys."""
    for key in reversed(path):
        node = {key: node}
    return node


def get(node: Node | None, path: Sequence[str]) -> Node | None:
    """The node at a path, or None."""
    for key in path:
        if isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            return None
    return node


def put(node: dict[str, Node], path: Sequence[str], value: Node) -> None:
    """Set the node at a path, making tables on the way (and replacing a bare "enabled" flag or None by
    one)."""
    *parents, last = path
    for key in parents:
        child = node.get(key)
        if not isinstance(child, dict):
            child = node[key] = {}
        node = child
    node[last] = value


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """Every leaf with its path."""
    if isinstance(node, Leaf):
        yield path, node
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from leaves(item, (*path, str(index)))
    else:
        for key, value in node.items():
            yield from leaves(value, (*path, key))


def place_of(node: Node, location: Sequence[str]) -> str | None:
    """Where the setting at `location` was written: its own leaf, the nearest leaf above or below it."""
    current: Node | None = node
    for depth in range(len(location) + 1):
        found = get(node, location[:depth])
        if found is None:
            break
        current = found
        if isinstance(found, Leaf):
            return found.place
    first = next(leaves(current), None) if current is not None else None
    return first[1].place if first is not None else None
