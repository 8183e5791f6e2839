"""Settings as a TOML file for people: tables in their order, with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from buckeye.config.settings import dotted
from buckeye.errors import UsageError

_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def to_toml(values: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """The settings as TOML. `comments` go above the key or table of that dotted name. Raises UsageError for
    None, which TOML has not."""
    return "\n".join(_table(values, (), comments)).strip() + "\n"


def _table(values: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[str, str]) -> Iterator[str]:
    """The plain values first: what follows a header belongs to it."""
    for key, value in values.items():
        if not _has_header(value, path, key):
            yield from _comment((*path, key), comments)
            yield f"{_key(key)} = {_value(value, (*path, key))}"
    for key, value in values.items():
        inner = (*path, key)
        if not _has_header(value, path, key):
            continue
        name = ".".join(map(_key, inner))
        tables = [(f"[{name}]", value)] if isinstance(value, Mapping) else [(f"[[{name}]]", v) for v in value]
        for header, table in tables:
            plain = not table or any(not _has_header(v, inner, k) for k, v in table.items())
            if plain or isinstance(value, list):
                yield ""
                yield from _comment(inner, comments)
                yield header
            yield from _table(table, inner, comments)


def _has_header(value: Any, path: tuple[str, ...], key: str) -> bool:
    """Whether a value gets a header of its own. Arguments of environments stay on one line."""
    if isinstance(value, Mapping):
        return not (key == "args" and "env" in path)
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _comment(path: tuple[str, ...], comments: Mapping[str, str]) -> list[str]:
    text = comments.get(dotted(path))
    return [f"# {line}" for line in text.splitlines()] if text else []


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any, path: Sequence[str]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(str(k))} = {_value(v, (*path, str(k)))}" for k, v in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item, path) for item in value)}]"
    if value is None:
        raise UsageError(
            f"{dotted(path)}: a TOML file cannot say None. Leave it out here, and add it where the "
            "configuration is started, as `buckeye rl @ run.toml --NAME None`"
        )
    return _text(str(value))
