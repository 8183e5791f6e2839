"""Reading configuration files: TOML or JSON, with the files they build on; and YAML of environments."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from buckeye.config.lines import explain_toml_error, json_lines, show_position, toml_lines
from buckeye.config.problems import Problem, did_you_mean
from buckeye.config.settings import KeyPath, Layer, Place, Settings
from buckeye.errors import ConfigError

BASES = "toml_files"
"""The key, in any table, that names files whose content the table builds on."""


def read_file(shown: str, asked: Place | None = None) -> Settings:
    """The settings of a file, merged over those of its `toml_files`. `shown` is the path as the user wrote
    it; messages repeat it. `asked` is where it was asked for.

    Raises ConfigError if it cannot be read or is no TOML or JSON.
    """
    return _read(shown, asked, ())


def _read(shown: str, asked: Place | None, within: tuple[str, ...]) -> Settings:
    prefix = f"{asked.text}: " if asked is not None else ""
    text = _text(shown, prefix)
    try:
        values, lines = _parse_json(shown, text) if shown.endswith(".json") else _parse_toml(shown, text)
    except RecursionError:
        raise ConfigError(f"{shown}: its lists or tables are nested too deeply.") from None
    places = {path: Place(f"{shown}:{line}", Layer.FILE) for path, line in lines.items()}
    return _with_bases(Settings(values, places), shown, within)


def _text(shown: str, prefix: str) -> str:
    path = Path(shown)
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{prefix}{shown} is YAML; configuration files are TOML (or JSON).")
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise ConfigError(f"{prefix}there is no file {shown}.{_others(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{prefix}{shown} is a folder, not a file.{_others(path / 'x')}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{shown}:{line}: not UTF-8. Save the file as UTF-8.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{prefix}{shown!r} cannot be read: {reason}.") from None


def _others(path: Path) -> str:
    """What could have been meant by a path that does not exist."""
    folder = path.parent
    if not folder.is_dir():
        return f" The folder {folder} does not exist either (this is {Path.cwd()})."
    try:
        files = sorted(f.name for f in folder.iterdir() if f.suffix in (".toml", ".json"))
    except OSError:
        return ""
    stems = {Path(name).stem: name for name in files}
    near = [str(folder / stems[stem]) for stem in difflib.get_close_matches(path.stem, stems)]
    if near or not files:
        return did_you_mean(near) or f" The folder {folder.absolute()} holds no .toml or .json file."
    return f" In that folder: {', '.join(files[:8])}."


def _parse_toml(shown: str, text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(explain_toml_error(shown, text, error)) from None
    except ValueError as error:  # a number or date that Python cannot hold
        raise ConfigError(f"{shown}: a value is out of range: {error}.") from None
    return values, toml_lines(text)


def _parse_json(shown: str, text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        values = load_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{shown}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}.\n"
            + show_position(text, error.lineno, error.colno)
        ) from None
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{shown}:1: expected a JSON object, as {{ ... }}.")
    return values, json_lines(text)


def load_json(text: str) -> Any:
    """Parse JSON strictly: no NaN, no key twice. Raises ValueError, or RecursionError for absurd nesting."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that a setting can have")


def _with_bases(settings: Settings, shown: str, within: tuple[str, ...]) -> Settings:
    """Put the files that a table names in `toml_files` under what the table says itself."""
    resolved = str(Path(shown).resolve())
    chain = (*within, resolved)
    result = Settings()
    for path in _tables_with_bases(settings.values):
        key = (*path, BASES)
        place = settings.place(key)
        names = settings.get(key)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            problem = Problem(path=key, place=place, message='expected a list of paths, as ["base.toml"].')
            raise ConfigError(str(problem))
        del settings.get(path)[BASES]
        for name in names:
            base = str(Path(shown).parent / name)
            if str(Path(base).resolve()) in chain:
                raise ConfigError(str(Problem(path=key, place=place, message=f"{base} builds on itself.")))
            result.merge(_read(base, place, chain), at=path)
    result.merge(settings)
    return result


def _tables_with_bases(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    """The tables that name such files, outer ones first, but for those in lists."""
    if not isinstance(value, dict):
        return []
    own = [path] if BASES in value else []
    return own + [found for key, item in value.items() for found in _tables_with_bases(item, (*path, key))]


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
    """Tells plain scalars apart as YAML 1.2 does."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern.pattern})\Z"), list(_first))


def read_yaml(path: Path) -> Settings:
    """The settings in a file, each with its place `file:line`. Raises ConfigError with file and line."""
    text = _yaml_text(path)
    try:
        node = yaml.compose(text, Loader=_Loader)
        return _Builder(str(path)).settings(node)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_explained(str(path), error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError(f"{path}: its lists or tables are nested too deeply.") from None


def _yaml_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path} (this is {Path.cwd()}).") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8. Save the file as UTF-8.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}.") from None


def _explained(shown: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"{shown}:{mark.line + 1}:{mark.column + 1}" if mark is not None else shown
    problem = error.problem or error.context or "it cannot be read"
    hint = ""
    if "mapping values" in problem:
        hint = " A text with a colon needs quotes."
    elif "'\\t'" in problem:
        hint = " Indent with spaces, not with tabs."
    return f"{place}: not valid YAML: {problem}.{hint}"


class _Builder:
    """Makes plain values of a tree of nodes, and notes where each stands."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.places: dict[KeyPath, Place] = {}
        self.count = 0

    def settings(self, node: yaml.Node | None) -> Settings:
        """The whole file."""
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{self.shown}:1: expected keys and values, as `name: value`.")
        values = self.value(node, ())
        return Settings(values, self.places)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1  # an alias counts each time, so a small file cannot become a large value
        if self.count > _MAX_VALUES:
            raise self.error(node, f"more than {_MAX_VALUES} values")
        self.places.setdefault(path, self.place(node))
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
                first = self.places[(*path, key.value)].text
                raise self.error(key, f"the key {key.value!r} is there twice (first: {first})")
            self.places[(*path, key.value)] = self.place(key)
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

    def place(self, node: yaml.Node) -> Place:
        return Place(f"{self.shown}:{node.start_mark.line + 1}", Layer.FILE)

    def error(self, node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(f"{self.place(node).text}: {message}.")
