"""Reader of configuration files: TOML or JSON."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from buckeye.config.line_numbers import json_line_numbers, toml_line_numbers
from buckeye.config.problems import closest, did_you_mean
from buckeye.config.settings import KeyPath, Layer, Location, Settings
from buckeye.config.toml_errors import explain_toml_error, show_position
from buckeye.errors import ConfigError


def read_file(shown: str, asked: Location | None = None) -> Settings:
    """Return the settings of a TOML or JSON file. `shown` is its path as the user wrote it; `asked` is the
    flag that named it.

    Raise `ConfigError` if the file cannot be read.
    """
    prefix = f"{asked.text}: " if asked is not None else ""
    if shown.endswith((".yaml", ".yml")):
        raise ConfigError(f"{prefix}{shown} is YAML; configuration files are TOML (or JSON).")
    text = read_text(shown, prefix)
    try:
        values, lines = _parse_json(shown, text) if shown.endswith(".json") else _parse_toml(shown, text)
    except RecursionError:
        raise ConfigError(f"{shown}: its lists or tables are nested too deeply.") from None
    locations = {path: Location(f"{shown}:{line}", Layer.FILE) for path, line in lines.items()}
    return Settings(values, locations)


def read_text(shown: str, prefix: str = "") -> str:
    """Return the text of a file. Raise `ConfigError`, prefixed with `prefix`, if it cannot be read."""
    path = Path(shown)
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise ConfigError(f"{prefix}there is no file {shown}.{_others(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{shown}:{line}: not UTF-8. Save the file as UTF-8.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{prefix}{shown} cannot be read: {reason}.") from None


def _others(path: Path) -> str:
    """Return suggestions for a path that does not exist."""
    folder = path.parent
    if not folder.is_dir():
        return f" The folder {folder} does not exist either (this is {Path.cwd()})."
    files = [file.name for file in folder.glob("*") if file.suffix == path.suffix]
    return did_you_mean([str(folder / name) for name in closest(path.name, files, count=1)])


def _parse_toml(shown: str, text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(explain_toml_error(shown, text, error)) from None
    except ValueError as error:  # a number or date outside Python's range
        raise ConfigError(f"{shown}: a value is out of range: {error}.") from None
    return values, toml_line_numbers(text)


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
    return values, json_line_numbers(text)


def load_json(text: str) -> Any:
    """Parse JSON strictly: no NaN, no duplicate keys. Raise `ValueError`, or `RecursionError` for excessive
    nesting.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
