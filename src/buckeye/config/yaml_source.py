"""Read YAML 1.2 files as settings with locations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from buckeye.config.config_files import TOO_DEEP, read_text
from buckeye.config.settings import KeyPath, Layer, Location, Settings
from buckeye.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT = (_TAG + kind for kind in ("null", "bool", "int", "float"))
_STR, _SEQ, _MAP = (_TAG + kind for kind in ("str", "seq", "map"))
_TEXTS = (_STR, *(_TAG + kind for kind in ("timestamp", "value", "merge")))
"""Kinds of scalars that stay text."""
_MAX_VALUES = 100_000


def read_yaml(path: Path) -> Settings:
    """Return the settings in a file, each with its location `file:line`.

    Raise `ConfigError`, with file and line, if the file cannot be read.
    """
    text = read_text(str(path))
    try:
        node = YAML(typ="safe", pure=True).compose(text)
        return _Builder(str(path)).settings(node)
    except MarkedYAMLError as error:
        raise _yaml_error(str(path), error) from None
    except YAMLError as error:
        message = f"not valid YAML: {' '.join(str(error).split())}"
        raise ConfigError(message, code="BK-CONFIG-SYNTAX", at=str(path)) from None
    except RecursionError:
        raise ConfigError(f"cannot read {path}: {TOO_DEEP}", code="BK-CONFIG-SYNTAX") from None


def _yaml_error(name: str, error: MarkedYAMLError) -> ConfigError:
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
    """Builder of plain values from the nodes of a YAML file, with the location of each value."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.locations: dict[KeyPath, Location] = {}
        self.count = 0

    def settings(self, node: Node | None) -> Settings:
        """Return the settings of the whole file."""
        if not isinstance(node, MappingNode):
            message = "expected keys and values, as `name: value`"
            raise ConfigError(message, code="BK-CONFIG-SYNTAX", at=f"{self.name}:1")
        values = self.value(node, ())
        return Settings(values, self.locations, has_flags=False)

    def value(self, node: Node, path: KeyPath) -> Any:
        self.count += 1  # an alias counts each time, so a small file cannot expand to a large value
        if self.count > _MAX_VALUES:
            raise self.error(node, f"more than {_MAX_VALUES:,} values")
        self.locations.setdefault(path, self.location(node))
        if isinstance(node, MappingNode) and node.tag == _MAP:
            return self.table(node, path)
        if isinstance(node, SequenceNode) and node.tag == _SEQ:
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self.scalar(node)
        raise self.error(node, f"the tag {node.tag} is not allowed")

    def table(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode) or key.tag != _STR:
                text = repr(key.value) if isinstance(key, ScalarNode) else "the key"
                raise self.error(key, "a key is not text", hint=f"put {text} in quotes")
            if key.value in values:
                first = self.locations[(*path, key.value)].text
                raise self.error(key, f"duplicate key {key.value!r}, first in {first}")
            self.locations[(*path, key.value)] = self.location(key)
            values[key.value] = self.value(value, (*path, key.value))
        return values

    def scalar(self, node: ScalarNode) -> Any:
        text: str = node.value
        if node.tag in _TEXTS:
            return text
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return text.lower() == "true"
        try:
            if node.tag == _INT:
                return int(text, 0) if text[:2] in ("0o", "0x", "0b") else int(text)
            if node.tag == _FLOAT:
                if not math.isfinite(value := float(text)):
                    raise self.error(node, f"{text} is out of range")
                return value
        except ValueError:
            raise self.error(
                node, f"{text[:30]!r} is not a valid {str(node.tag).removeprefix(_TAG)}"
            ) from None
        raise self.error(node, f"the tag {node.tag} is not allowed")

    def location(self, node: Node) -> Location:
        return Location(f"{self.name}:{node.start_mark.line + 1}", Layer.FILE)

    def error(self, node: Node, message: str, hint: str | None = None) -> ConfigError:
        return ConfigError(message, code="BK-CONFIG-SYNTAX", at=self.location(node).text, hint=hint)
