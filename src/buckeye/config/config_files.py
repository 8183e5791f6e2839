"""Read configuration files in TOML or JSON."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from buckeye.config.line_numbers import json_line_numbers, toml_line_numbers
from buckeye.config.problems import closest_file
from buckeye.config.settings import MISSING, KeyPath, Layer, Location, Settings
from buckeye.config.toml_errors import show_position, toml_error
from buckeye.errors import ConfigError

TOO_DEEP = "lists or tables are nested too deeply"

_PROJECT_TABLES = (
    ("project",),
    ("project", "scripts"),
    ("project", "entry-points"),
    ("tool",),
    ("tool", "buckeye"),
)


def read_file(name: str, flag: Location | None = None) -> Settings:
    """Return the settings of a TOML or JSON file.

    `name` is the path that the user wrote. `flag` is `--SECTION` for the arguments `--SECTION @ FILE`, and
    None for `@ FILE`. Raise `ConfigError` if the file cannot be read.
    """
    at = flag.text if flag is not None else None
    if name.endswith((".yaml", ".yml")):
        message = f"cannot read {name}: configuration files are TOML or JSON, not YAML"
        raise ConfigError(message, code="BK-FILE-FORMAT", at=at, hint="write the settings as TOML")
    text = read_text(name, at)
    try:
        values, lines = _parse_json(name, text) if name.endswith(".json") else _parse_toml(name, text)
    except RecursionError:
        raise ConfigError(f"cannot read {name}: {TOO_DEEP}", code="BK-CONFIG-SYNTAX") from None
    locations = {path: Location(f"{name}:{line}", Layer.FILE) for path, line in lines.items()}
    return Settings(values, locations)


def read_project(file: Path) -> dict[str, Any]:
    """Return the tables of a `pyproject.toml`. Raise `ConfigError` for another value in place of a table."""
    settings = read_file(str(file))
    for path in _PROJECT_TABLES:
        if not isinstance(value := settings.get(path), dict) and value is not MISSING:
            place, name = settings.locations.get(path), ".".join(path)
            raise ConfigError(
                "expected a table",
                code="BK-CONFIG-VALUE",
                at=f"{file if place is None else place.text} ({name})",
                hint=f"write `[{name}]`",
            )
    return settings.values


def read_text(name: str, at: str | None = None) -> str:
    """Return the text of a file. Raise `ConfigError`, with the flag `at`, if the file cannot be read."""
    path = Path(name)
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        message = f"cannot read {name}: the file does not exist"
        raise ConfigError(
            message, code="BK-FILE-NOT-FOUND", at=at, hint=hint_for_missing_file(path)
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message, hint = "the file is not UTF-8 text", "save the file as UTF-8"
        raise ConfigError(message, code="BK-FILE-UNREADABLE", at=f"{name}:{line}", hint=hint) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        code = "BK-FILE-PERMISSION" if isinstance(error, PermissionError) else "BK-FILE-UNREADABLE"
        is_folder = isinstance(error, IsADirectoryError)
        hint = "name a TOML or JSON file" if is_folder else "check the path and its permissions"
        raise ConfigError(f"cannot read {name}: {reason}", code=code, at=at, hint=hint) from None


def load_json(text: str) -> Any:
    """Parse JSON strictly: no NaN, no duplicate keys.

    Raise `ValueError`, or `RecursionError` for excessive nesting.
    """
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def hint_for_missing_file(path: Path) -> str:
    """Return a hint with the existing path that is closest to a missing one, or else with the folder."""
    if not path.parent.is_dir():
        return f"check the path: the folder {path.parent} does not exist in {Path.cwd()} either"
    files = (file for file in path.parent.glob("*") if file.suffix == path.suffix)
    return closest_file(path, files) or f"check the path: the working directory is {Path.cwd()}"


def _parse_toml(name: str, text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise toml_error(name, text, error) from None
    except ValueError as error:  # a number or date that Python cannot represent
        message = f"cannot read {name}: a value is out of range: {error}"
        raise ConfigError(message, code="BK-CONFIG-SYNTAX") from None
    return values, toml_line_numbers(text)


def _parse_json(name: str, text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        values = load_json(text)
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg}\n{show_position(text, error.lineno, error.colno)}"
        at = f"{name}:{error.lineno}:{error.colno}"
        raise ConfigError(message, code="BK-CONFIG-SYNTAX", at=at) from None
    except ValueError as error:
        raise ConfigError(f"cannot read {name}: {error}", code="BK-CONFIG-SYNTAX") from None
    if not isinstance(values, dict):
        message, hint = "expected a JSON object", "put the settings in braces: `{...}`"
        raise ConfigError(message, code="BK-CONFIG-SYNTAX", at=f"{name}:1", hint=hint)
    return values, json_line_numbers(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"duplicate key {duplicate!r}")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
