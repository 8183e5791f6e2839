"""Reading configuration files: TOML or JSON."""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Any

from buckeye.config.lines import explain_toml_error, json_lines, show_position, toml_lines
from buckeye.config.problems import did_you_mean
from buckeye.config.settings import KeyPath, Layer, Place, Settings
from buckeye.errors import ConfigError


def read_file(shown: str, asked: Place | None = None) -> Settings:
    """Return the settings of a TOML or JSON file. `shown` is its path as the user wrote it; `asked` is the
    flag that named it.

    Raises ConfigError if the file cannot be read.
    """
    prefix = f"{asked.text}: " if asked is not None else ""
    text = _text(shown, prefix)
    try:
        values, lines = _parse_json(shown, text) if shown.endswith(".json") else _parse_toml(shown, text)
    except RecursionError:
        raise ConfigError(f"{shown}: its lists or tables are nested too deeply.") from None
    places = {path: Place(f"{shown}:{line}", Layer.FILE) for path, line in lines.items()}
    return Settings(values, places)


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
