"""Reading configuration files: TOML with the line of every key, JSON, inheritance by `toml_files`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buckeye.config.tree import Leaf, Node, merge
from buckeye.errors import ConfigError

_FILE_RANK = 1
_INHERIT = "toml_files"
_KEY = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*""")
_UNQUOTED = re.compile(r"^(\s*[A-Za-z0-9_.\"'-]+\s*=\s*)([^\s\"'\[{#][^#]*?)(\s*(?:#.*)?)$")


def read_config_file(path: Path, _seen: tuple[Path, ...] = ()) -> dict[str, Node]:
    """The settings of a .toml or .json file, those of the files it inherits from underneath.

    Raises ConfigError naming file, line and what to write instead.
    """
    if path.resolve() in _seen:
        chain = " -> ".join(str(p) for p in (*_seen, path))
        raise ConfigError(f"{path}: `{_INHERIT}` goes in a circle: {chain}")
    text = _read_text(path)
    if path.suffix == ".json":
        tree = _tree(_parse_json(path, text), {}, str(path), ())
    else:
        tree = _tree(_parse_toml(path, text), key_lines(text), str(path), ())
    assert isinstance(tree, dict)
    inherited = tree.pop(_INHERIT, None)
    merged: Node = {}
    for parent in _parents(path, inherited):
        merged = merge(merged, read_config_file(parent, (*_seen, path.resolve())))
    merged = merge(merged, tree)
    assert isinstance(merged, dict)
    return merged


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        there = f"; {path.parent} has {', '.join(near[:5])}" if near else ""
        raise ConfigError(f"{path}: there is no such file{there}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name a .toml file in it") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _parents(path: Path, node: Node | None) -> list[Path]:
    if node is None:
        return []
    value = node.value if isinstance(node, Leaf) else None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        place = node.place if isinstance(node, Leaf) else str(path)
        raise ConfigError(f'{place}: {_INHERIT} is a list of file names, e.g. {_INHERIT} = ["base.toml"]')
    return [path.parent / name for name in names]


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(_pointing(path, text, error.lineno, error.colno, error.msg, None)) from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a configuration is an object {{...}}, not {type(data).__name__}")
    return data


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line, column = _position(str(error), text)
        message = re.sub(r"\s*\(at .*\)$", "", str(error))
        raise ConfigError(_pointing(path, text, line, column, message, _hint(text, line))) from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None


def _position(message: str, text: str) -> tuple[int, int]:
    found = re.search(r"line (\d+), column (\d+)", message)
    if found:
        return int(found.group(1)), int(found.group(2))
    return max(text.rstrip().count("\n") + 1, 1), 1  # "at end of document"


def _pointing(path: Path, text: str, line: int, column: int, message: str, hint: str | None) -> str:
    """`file:line:column: message`, the line, a caret, and the corrected line if there is one."""
    lines = text.splitlines()
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    parts = [f"{path}:{line}:{column}: {message}", f"  {shown}", f"  {' ' * (column - 1)}^"]
    if hint is not None:
        parts.append(hint)
    return "\n".join(parts)


def _hint(text: str, line: int) -> str | None:
    lines = text.splitlines()
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    found = _UNQUOTED.match(shown)
    if found is None:
        return None
    before, value, after = found.groups()
    if value.lower() in ("true", "false"):
        return f"In TOML that is written\n  {before}{value.lower()}{after}"
    if value.lower() in ("none", "null"):
        return f'In TOML that is written\n  {before}"None"{after}'
    if _is_toml_value(value):
        return None
    quoted = json.dumps(value, ensure_ascii=False)
    return f"Text is quoted in TOML:\n  {before}{quoted}{after}"


def _is_toml_value(value: str) -> bool:
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        return False
    return True


def _tree(value: Any, lines: dict[tuple[str, ...], int], file: str, path: tuple[str, ...]) -> Node:
    if isinstance(value, dict):
        return {key: _tree(item, lines, file, (*path, key)) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_tree(item, lines, file, (*path, str(i))) for i, item in enumerate(value)]
    return Leaf(value, _place(file, lines, path), _FILE_RANK)


def _place(file: str, lines: dict[tuple[str, ...], int], path: Sequence[str]) -> str:
    for depth in range(len(path), 0, -1):
        line = lines.get(tuple(path[:depth]))
        if line is not None:
            return f"{file}:{line}"
    return file


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Path of keys -> line (from 1) of the statement that sets it, in a valid TOML text.

    Elements of arrays of tables have their index as a key. Keys inside an inline table or array count as on
    the line where the statement begins.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    for number, statement in _statements(text):
        if statement.startswith("[["):
            bare = _indexed(_keys(statement[2:]), counts)
            counts[bare] = counts.get(bare, -1) + 1
            table = (*bare, str(counts[bare]))
            lines[table] = number
        elif statement.startswith("["):
            table = _indexed(_keys(statement[1:]), counts)
            lines.setdefault(table, number)
        else:
            lines[(*table, *_keys(statement))] = number
    return lines


def _indexed(keys: tuple[str, ...], counts: dict[tuple[str, ...], int]) -> tuple[str, ...]:
    """Insert the index of the newest element after every parent that is an array of tables."""
    path: tuple[str, ...] = ()
    for position, key in enumerate(keys):
        path = (*path, key)
        if path in counts and position < len(keys) - 1:
            path = (*path, str(counts[path]))
    return path


def _keys(text: str) -> tuple[str, ...]:
    keys, position = [], 0
    while found := _KEY.match(text, position):
        basic, literal, bare = found.groups()
        keys.append(json.loads(f'"{basic}"') if basic is not None else literal if bare is None else bare)
        position = found.end()
        if text[position : position + 1] != ".":
            break
        position += 1
    return tuple(keys)


_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n]|[^"\'#\[\]{}\n]+',
    re.S,
)


def _statements(text: str) -> list[tuple[int, str]]:
    """(line, text) of every statement; multi-line strings and arrays belong to the statement they are in."""
    statements, current, start, line, depth = [], "", 1, 1, 0
    for token in _TOKEN.findall(text):
        if token == "\n" and (depth == 0 or current.lstrip().startswith("[")):
            if current.strip():
                statements.append((start, current.strip()))
            current, depth = "", 0
        elif not token.startswith("#"):
            if not current.strip():
                start = line
            current += token
            depth += (token in "[{") - (token in "]}") if len(token) == 1 else 0
        line += token.count("\n")
    if current.strip():
        statements.append((start, current.strip()))
    return statements
