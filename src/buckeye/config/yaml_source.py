"""Reader of YAML files, as settings with locations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from buckeye.config.config_files import read_text
from buckeye.config.settings import KeyPath, Layer, Location, Settings
from buckeye.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT = (_TAG + kind for kind in ("null", "bool", "int", "float"))
_STR, _SEQ, _MAP = (_TAG + kind for kind in ("str", "seq", "map"))
_RESOLVERS = (
    (_NULL, re.compile(r"~|null|Null|NULL|"), ("~", "n", "N", "")),
    (_BOOL, re.compile(r"true|True|TRUE|false|False|FALSE"), tuple("tTfF")),
    (_INT, re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), tuple("-+0123456789")),
    (
        _FLOAT,
        re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"),
        tuple("-+.0123456789"),
    ),
)
_MAX_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """Loader that distinguishes plain scalars as YAML 1.2 does."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern.pattern})\Z"), list(_first))


def read_yaml(path: Path) -> Settings:
    """Return the settings in a file, each with its location `file:line`. Raise `ConfigError` with file and
    line.
    """
    text = read_text(str(path))
    try:
        node = yaml.compose(text, Loader=_Loader)
        return _Builder(str(path)).settings(node)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_explained(str(path), error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError(f"{path}: its lists or tables are nested too deeply.") from None


def _explained(shown: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    location = f"{shown}:{mark.line + 1}:{mark.column + 1}" if mark is not None else shown
    problem = error.problem or error.context or "it cannot be read"
    hint = ""
    if "mapping values" in problem:
        hint = " A text with a colon needs quotes."
    elif "'\\t'" in problem:
        hint = " Indent with spaces, not with tabs."
    return f"{location}: not valid YAML: {problem}.{hint}"


class _Builder:
    """Builder of plain values from a tree of nodes, with the location of each."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.locations: dict[KeyPath, Location] = {}
        self.count = 0

    def settings(self, node: yaml.Node | None) -> Settings:
        """Return the settings of the whole file."""
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{self.shown}:1: expected keys and values, as `name: value`.")
        values = self.value(node, ())
        return Settings(values, self.locations)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1  # an alias counts each time, so a small file cannot expand to a large value
        if self.count > _MAX_VALUES:
            raise self.error(node, f"more than {_MAX_VALUES} values")
        self.locations.setdefault(path, self.location(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self.table(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        raise self.error(node, f"the tag {node.tag} is not allowed")

    def table(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != _STR:
                shown = f"{key.value!r}" if isinstance(key, yaml.ScalarNode) else "it"
                raise self.error(key, f"a key is a text; put {shown} in quotes")
            if key.value in found:
                first = self.locations[(*path, key.value)].text
                raise self.error(key, f"the key {key.value!r} is there twice (first: {first})")
            self.locations[(*path, key.value)] = self.location(key)
            found[key.value] = self.value(value, (*path, key.value))
        return found

    def scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if node.tag == _STR:
            return text
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return text.lower() == "true"
        try:
            if node.tag == _INT:
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if node.tag == _FLOAT:
                return self.number(node, float(text))
        except ValueError:
            raise self.error(node, f"{text[:30]!r} is no {node.tag.removeprefix(_TAG)}") from None
        raise self.error(node, f"the tag {node.tag} is not allowed")

    def number(self, node: yaml.ScalarNode, value: float) -> float:
        if value in (float("inf"), float("-inf")) or value != value:
            raise self.error(node, f"{node.value} is out of range")
        return value

    def location(self, node: yaml.Node) -> Location:
        return Location(f"{self.shown}:{node.start_mark.line + 1}", Layer.FILE)

    def error(self, node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(f"{self.location(node).text}: {message}.")
