"""Reader of YAML files, as settings with locations."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from buckeye.config.config_files import TOO_DEEP, read_text
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
    """Return the settings in a file, each with its location `file:line`.

    Raise `ConfigError` with file and line.
    """
    text = read_text(str(path))
    try:
        node = yaml.compose(text, Loader=_Loader)
        return _Builder(str(path)).settings(node)
    except yaml.MarkedYAMLError as error:
        raise _yaml_error(str(path), error) from None
    except yaml.YAMLError as error:
        message = f"not valid YAML: {' '.join(str(error).split())}"
        raise ConfigError(message, code="BK-CONFIG-SYNTAX", at=str(path)) from None
    except RecursionError:
        raise ConfigError(f"cannot read {path}: {TOO_DEEP}", code="BK-CONFIG-SYNTAX") from None


def _yaml_error(name: str, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    at = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
    problem = error.problem or error.context or "the file cannot be parsed"
    hint = None
    if "mapping values" in problem:
        hint = "put quotes around a text with a colon"
    elif "'\\t'" in problem:
        hint = "indent with spaces, not with tabs"
    return ConfigError(f"not valid YAML: {problem}", code="BK-CONFIG-SYNTAX", at=at, hint=hint)


class _Builder:
    """Builder of plain values from a tree of nodes, with the location of each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.locations: dict[KeyPath, Location] = {}
        self.count = 0

    def settings(self, node: yaml.Node | None) -> Settings:
        """Return the settings of the whole file."""
        if not isinstance(node, yaml.MappingNode):
            message = "expected keys and values, as `name: value`"
            raise ConfigError(message, code="BK-CONFIG-SYNTAX", at=f"{self.name}:1")
        values = self.value(node, ())
        return Settings(values, self.locations, has_flags=False)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1  # an alias counts each time, so a small file cannot expand to a large value
        if self.count > _MAX_VALUES:
            raise self.error(node, f"more than {_MAX_VALUES:,} values")
        self.locations.setdefault(path, self.location(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self.table(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        raise self.error(node, f"the tag {node.tag} is not allowed")

    def table(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != _STR:
                text = repr(key.value) if isinstance(key, yaml.ScalarNode) else "the key"
                raise self.error(key, "a key is not text", hint=f"put {text} in quotes")
            if key.value in values:
                first = self.locations[(*path, key.value)].text
                raise self.error(key, f"duplicate key {key.value!r}, first in {first}")
            self.locations[(*path, key.value)] = self.location(key)
            values[key.value] = self.value(value, (*path, key.value))
        return values

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
                if not math.isfinite(value := float(text)):
                    raise self.error(node, f"{text} is out of range")
                return value
        except ValueError:
            raise self.error(node, f"{text[:30]!r} is not a valid {node.tag.removeprefix(_TAG)}") from None
        raise self.error(node, f"the tag {node.tag} is not allowed")

    def location(self, node: yaml.Node) -> Location:
        return Location(f"{self.name}:{node.start_mark.line + 1}", Layer.FILE)

    def error(self, node: yaml.Node, message: str, hint: str | None = None) -> ConfigError:
        return ConfigError(message, code="BK-CONFIG-SYNTAX", at=self.location(node).text, hint=hint)
