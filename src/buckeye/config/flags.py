"""Command lines: `@ file`, `--section @ file`, `--a.b value`, and the settings of `PRIME_A__B` variables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buckeye.config.base import BaseConfig
from buckeye.config.fields import FieldType, canonical_name, suggestions, type_of
from buckeye.config.source import read_config_file
from buckeye.config.tree import Leaf, Node, get, merge, nest, put

_ENV_RANK, _FLAG_RANK = 0, 2
_ENV_PREFIX = "PRIME_"
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def read_command_line(
    model: type[BaseConfig], argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Node], list[str]]:
    """All settings for `model` as a tree, and the problems found in the words of the command line.

    Flags beat files, a later file beats an earlier one, files beat environment variables. Raises ConfigError
    for a file that cannot be read.
    """
    variables = os.environ if environ is None else environ
    words = _Words(model, list(argv))
    words.read()
    tree = merge(merge(_from_environment(model, variables), words.files), words.flags)
    assert isinstance(tree, dict)
    return tree, words.problems


def resolve(model: type[BaseConfig], path: Sequence[str]) -> tuple[tuple[str, ...], FieldType] | None:
    """The canonical path and type of a dotted path; None if there is no such setting. Keys below a free table
    (`env.0.args.x`) resolve to that table's type."""
    models: tuple[type[BaseConfig], ...] = (model,)
    found: list[str] = []
    kind: FieldType | None = None
    for key in path:
        if kind is not None and kind.is_dict:
            found.append(key)
            continue
        if kind is not None and kind.item_models and not models:
            if not key.isdigit():
                return None
            found.append(key)
            models = kind.item_models
            continue
        name = canonical_name(models, key)
        if name is None:
            return None
        kind = type_of(models, name)
        found.append(name)
        models = kind.models
    return (tuple(found), kind) if kind is not None else None


class _Words:
    """The words of a command line, read from left to right."""

    def __init__(self, model: type[BaseConfig], argv: list[str]) -> None:
        self.model = model
        self.argv = argv
        self.files: Node = {}
        self.flags: dict[str, Node] = {}
        self.problems: list[str] = []
        self._seen: set[tuple[str, ...]] = set()

    def read(self) -> None:
        """Read every word."""
        while self.argv:
            word = self.argv.pop(0)
            if word.startswith("@"):
                self._file((), word)
            elif word.startswith("--") and len(word) > 2:
                self._flag(word)
            else:
                self.problems.append(
                    f"{word}: unexpected word; settings are flags (`--max-steps 10`) or files (`@ train.toml`)"
                )

    def _file(self, path: tuple[str, ...], at_word: str) -> None:
        name = at_word[1:] or (self.argv.pop(0) if self.argv else "")
        if not name or name.startswith("--"):
            where = f"--{'.'.join(path)} " if path else ""
            self.problems.append(f"{where}@: the name of a file is missing after the @")
            return
        self.files = merge(self.files, nest(path, read_config_file(Path(name).expanduser())))

    def _flag(self, word: str) -> None:
        written, equals, inline = word[2:].partition("=")
        keys = tuple(written.replace("-", "_").split("."))
        resolved = resolve(self.model, keys)
        if resolved is None and (negated := self._negated(written)) is not None:
            if equals:
                self.problems.append(f"--{written} takes no value")
                return
            path, kind = negated
            put(self.flags, path, Leaf(False if kind.is_bool else None, f"--{written}", _FLAG_RANK))
            return
        if resolved is None:
            self.problems.append(unknown_setting(self.model, keys, f"--{written}"))
            self._skip_values()
            return
        path, kind = resolved
        if not equals and self.argv and self.argv[0].startswith("@"):
            self._file(path, self.argv.pop(0))
            return
        values = [inline] if equals else self._values(kind, free=len(path) > len(keys))
        self._set(path, kind, values, f"--{written}")

    def _negated(self, written: str) -> tuple[tuple[str, ...], FieldType] | None:
        """What `--no-a.b` means: a boolean off, or an optional section None."""
        if not written.startswith(("no-", "no_")):
            return None
        resolved = resolve(self.model, tuple(written[3:].replace("-", "_").split(".")))
        if resolved is None or not (resolved[1].is_bool or (resolved[1].models and resolved[1].allows_none)):
            return None
        return resolved

    def _values(self, kind: FieldType, *, free: bool) -> list[str]:
        """The words that belong to a flag: several for a list, an optional one for a switch, else one."""
        taken: list[str] = []
        while self.argv and not self.argv[0].startswith(("--", "@")):
            if kind.is_bool and self.argv[0].lower() not in (*_TRUE, *_FALSE):
                break
            taken.append(self.argv.pop(0))
            if not kind.is_list:
                break
        return taken

    def _skip_values(self) -> None:
        while self.argv and not self.argv[0].startswith(("--", "@")):
            self.argv.pop(0)

    def _set(self, path: tuple[str, ...], kind: FieldType, values: list[str], flag: str) -> None:
        if not values and not kind.is_bool and not kind.models:
            self.problems.append(f"{flag}: a value is missing")
            return
        value = _convert(kind, values)
        node: Node
        if kind.is_list and path in self._seen:  # a repeated list flag adds to it
            before = get(self.flags, path)
            if isinstance(before, Leaf) and isinstance(before.value, list) and isinstance(value, list):
                value = before.value + value
        self._seen.add(path)
        node = _with_place(value, flag)
        if isinstance(node, dict) and not node and isinstance(get(self.flags, path), dict):
            return  # `--ckpt.interval 5 --ckpt`: enabled already
        put(self.flags, path, node)


def unknown_setting(model: type[BaseConfig], keys: Sequence[str], place: str) -> str:
    """The message for a setting that does not exist."""
    flag_style = place.startswith("--")
    close = suggestions(model, keys)
    shown = [f"--{name.replace('_', '-')}" if flag_style else name for name in close]
    hint = (
        f"; did you mean {' or '.join(shown)}?" if shown else f" (see `{model.__name__[:-6].lower()} --help`)"
    )
    name = "" if flag_style else f" `{'.'.join(keys)}`"
    return (
        f"{place}: there is no setting{name} of this name{hint}"
        if flag_style
        else (f"{place}: there is no setting{name}{hint}")
    )


def _convert(kind: FieldType, values: list[str]) -> Any:
    """Words as a value. Numbers and choices stay text: validation reads them by the field's type."""
    text = " ".join(values)
    if not values:
        return True if kind.is_bool else {}
    if text.lower() in ("none", "null") and (kind.allows_none or kind.models):
        return None
    if kind.is_bool and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    if text[:1] in "[{" and (kind.is_list or kind.is_dict or kind.models):
        try:
            return json.loads(text)
        except ValueError:
            return text
    if kind.is_list:
        return [item.strip() for word in values for item in word.split(",") if item.strip()]
    if kind.is_dict:
        return _scalar(text)
    return text


def _scalar(text: str) -> Any:
    """A value inside a free table has no declared type: JSON if it reads as JSON, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_place(value: Any, place: str, rank: int = _FLAG_RANK) -> Node:
    if isinstance(value, dict):
        return {str(key): _with_place(item, place, rank) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_with_place(item, place, rank) for item in value]
    return Leaf(value, place, rank)


def _from_environment(model: type[BaseConfig], variables: Mapping[str, str]) -> Node:
    """`PRIME_TRAINER__MAX_STEPS=5`. Variables that name no setting (PRIME_API_KEY) are none of our
    business."""
    tree: dict[str, Node] = {}
    for name, text in sorted(variables.items()):
        if not name.startswith(_ENV_PREFIX):
            continue
        resolved = resolve(model, tuple(name[len(_ENV_PREFIX) :].lower().split("__")))
        if resolved is not None:
            path, kind = resolved
            put(tree, path, _with_place(_convert(kind, [text]), f"${name}", _ENV_RANK))
    return tree
