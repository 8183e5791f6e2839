"""Bring a tree of settings into the shape of its configuration class: names, unions, lists of tables."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.config.base import BaseConfig
from buckeye.config.fields import FieldType, canonical_name, default_variant, type_of
from buckeye.config.flags import unknown_setting
from buckeye.config.tree import Leaf, Node, Path, merge, place_of


def canonical(model: type[BaseConfig], tree: Node, problems: list[str]) -> dict[str, Node]:
    """Older names replaced, unknown ones reported in `problems`, `type` filled in where a union's default is
    meant, tables of numbers turned into lists."""
    shaped = _table((model,), tree, (), model, problems)
    assert isinstance(shaped, dict)
    return shaped


def _table(
    models: Sequence[type[BaseConfig]], node: Node, path: Path, root: type[BaseConfig], problems: list[str]
) -> Node:
    if not isinstance(node, dict):
        return node
    shaped: dict[str, Node] = {}
    for key, value in node.items():
        name = canonical_name(models, key)
        if name is None:
            place = place_of(node, (key,)) or ".".join(path)
            problems.append(unknown_setting(root, (*path, key), place))
            continue
        value = _value(type_of(models, name), value, (*path, name), root, problems)
        shaped[name] = merge(*_by_rank(shaped[name], value)) if name in shaped else value
    variant = default_variant(models)
    if variant is not None and "type" not in shaped:
        shaped["type"] = Leaf(variant, "default", -1)
    return shaped


def _by_rank(first: Node, second: Node) -> tuple[Node, Node]:
    """A setting given under two of its names: the stronger place is merged last."""
    if isinstance(first, Leaf) and isinstance(second, Leaf) and first.rank > second.rank:
        return second, first
    return first, second


def _value(kind: FieldType, node: Node, path: Path, root: type[BaseConfig], problems: list[str]) -> Node:
    if kind.item_models:
        if isinstance(node, dict) and all(key.isdigit() for key in node):
            node = [node[key] for key in sorted(node, key=int)]
        if isinstance(node, list):
            return [
                _table(kind.item_models, item, (*path, str(i)), root, problems) for i, item in enumerate(node)
            ]
    if kind.models:
        return _table(kind.models, node, path, root, problems)
    return node
