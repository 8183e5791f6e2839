"""Questions about configuration classes: which field a path of keys means, and what it may hold."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from buckeye.config.base import BaseConfig


@dataclass(frozen=True, slots=True)
class FieldType:
    """What a field may hold: configuration classes, lists of them, and other types."""

    models: tuple[type[BaseConfig], ...]
    item_models: tuple[type[BaseConfig], ...]
    others: tuple[Any, ...]

    @property
    def is_bool(self) -> bool:
        return bool in self.others

    @property
    def is_list(self) -> bool:
        return bool(self.item_models) or any(get_origin(other) is list for other in self.others)

    @property
    def is_dict(self) -> bool:
        return any(get_origin(other) is dict for other in self.others)

    @property
    def allows_none(self) -> bool:
        return type(None) in self.others


def field_type(annotation: Any) -> FieldType:
    """Take an annotation apart."""
    models, item_models, others = [], [], []
    for part in _alternatives(annotation):
        if isinstance(part, type) and issubclass(part, BaseConfig):
            models.append(part)
        elif get_origin(part) is list and (inner := field_type(get_args(part)[0])).models:
            item_models += inner.models
        else:
            others.append(part)
    return FieldType(tuple(models), tuple(item_models), tuple(others))


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    else:
        yield annotation


def canonical_name(models: Sequence[type[BaseConfig]], key: str) -> str | None:
    """The field that `key` names in any of the classes, an older name included; None if there is none."""
    for model in models:
        name = model.aliases.get(key, key)
        if name in model.model_fields:
            return name
    return None


def type_of(models: Sequence[type[BaseConfig]], name: str) -> FieldType:
    """The type of a field by its name, over all variants that have it."""
    parts = [field_type(m.model_fields[name].annotation) for m in models if name in m.model_fields]
    return FieldType(
        tuple(x for part in parts for x in part.models),
        tuple(x for part in parts for x in part.item_models),
        tuple(x for part in parts for x in part.others),
    )


def default_variant(models: Sequence[type[BaseConfig]]) -> str | None:
    """The `type` of the first variant of a union of classes; None if they are not told apart by `type`."""
    if len(models) < 2 or "type" not in models[0].model_fields:
        return None
    return str(models[0].model_fields["type"].default)


def all_paths(model: type[BaseConfig], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every path of keys below a class with its FieldInfo, depth first."""
    for name, info in model.model_fields.items():
        path = (*prefix, name)
        yield path, info
        kind = field_type(info.annotation)
        for inner in (*kind.models, *kind.item_models):
            yield from all_paths(inner, path)


def suggestions(model: type[BaseConfig], path: Sequence[str]) -> list[str]:
    """Paths that are spelled or placed like an unknown one, best first, at most three."""
    known = sorted({".".join(p) for p, _ in all_paths(model)})
    wanted = ".".join(path)
    same_table = [k for k in known if k.split(".")[:-1] == list(path[:-1])]
    close = difflib.get_close_matches(path[-1], [k.rpartition(".")[2] for k in same_table], n=2, cutoff=0.6)
    found = [".".join([*path[:-1], name]) for name in close]
    found += [k for k in known if k.rpartition(".")[2] == path[-1] and k not in found][:2]
    found += [k for k in difflib.get_close_matches(wanted, known, n=2, cutoff=0.75) if k not in found]
    if path[-1] in _SYNONYMS:
        found = [k for k in same_table if k.rpartition(".")[2] == _SYNONYMS[path[-1]]] + found
    return list(dict.fromkeys(found))[:3]


_SYNONYMS = {
    "learning_rate": "lr",
    "group_size": "rollouts_per_example",
    "num_steps": "max_steps",
    "steps": "max_steps",
    "envs": "env",
    "keep_last": "keep",
    "resume": "resume_step",
}


def type_text(annotation: Any) -> str:
    """A type as help text shows it: `int`, `adamw | muon`, `list of int`."""
    parts = []
    for part in _alternatives(annotation):
        if part is type(None):
            parts.append("none")
        elif get_origin(part) is Literal:
            parts += [str(value) for value in get_args(part)]
        elif get_origin(part) is list:
            parts.append(f"list of {type_text(get_args(part)[0])}")
        elif get_origin(part) is dict or (isinstance(part, type) and issubclass(part, BaseConfig)):
            parts.append("table")
        else:
            parts.append(getattr(part, "__name__", str(part)).lower())
    return " | ".join(dict.fromkeys(parts))
