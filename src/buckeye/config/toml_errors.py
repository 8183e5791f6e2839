"""Make error messages for invalid TOML, with the line and a corrected line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

from buckeye.errors import ConfigError

_POSITION = re.compile(r" \(at line (\d+), column (\d+)\)$")
_NUMBERS = re.compile(r"[\d\s.,_+-]+(e[+-]?\d+)?[,;]?", re.I)
_AT_END = " (at end of document)"
_PAIR = re.compile(r"(?P<key>\s*[\w.\"'-]+?)\s*=\s*(?P<value>.*?)\s*(?P<comment>#.*)?")
_CURLY = str.maketrans("“”„‟‘’‚‛", "\"\"\"\"''''")
_CLOSING = {"[": "]", "{": "}", '"': '"', "'": "'"}
_DUPLICATE = ("cannot overwrite", "cannot declare")
_MAX_SHOWN = 160
_MAX_CORRECTED = 1000


def toml_error(name: str, text: str, error: tomllib.TOMLDecodeError) -> ConfigError:
    """Return the error for invalid TOML, with file, line number, column and the text of the line.

    If a correction of the line is found, it is the hint. `name` is the name of the file, and `text` is its
    content.
    """
    reason, line, column = _locate(text, error)
    message = f"not valid TOML: {reason[:1].lower()}{reason[1:]}\n{show_position(text, line, column)}"
    lines, hint = text.split("\n"), None
    for corrected, action in _candidates(lines[line - 1]):
        if _error_line("\n".join([*lines[: line - 1], corrected, *lines[line:]])) > line:
            hint = f"{action}: `{corrected.strip()}`"
            break
    if hint is None and reason.lower().startswith(_DUPLICATE):
        hint = "remove one of the lines that set this key"
    return ConfigError(message, code="BK-CONFIG-SYNTAX", at=f"{name}:{line}:{column}", hint=hint)


def show_position(text: str, line: int, column: int) -> str:
    """Return the text of a line, with a caret under the column. Lines and columns count from 1."""
    lines = text.split("\n")
    content = lines[line - 1].replace("\t", " ") if line <= len(lines) else ""
    start = max(0, column - _MAX_SHOWN)
    return f"    {content[start : start + _MAX_SHOWN]}\n    {' ' * (column - 1 - start)}^"


def _locate(text: str, error: tomllib.TOMLDecodeError) -> tuple[str, int, int]:
    """Return the reason, the line and the column of an error.

    An error at the end of the text gets the last line with content.
    """
    message = str(error)
    if (match := _POSITION.search(message)) is not None:
        return message[: match.start()], int(match[1]), int(match[2])
    lines = text.rstrip().split("\n")
    return message.removesuffix(_AT_END), len(lines), len(lines[-1]) + 1


def _error_line(text: str) -> float:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _POSITION.search(str(error))
        return int(match[1]) if match is not None else 0.0
    except (ValueError, RecursionError):
        return 0.0
    return float("inf")


def _candidates(line: str) -> Iterator[tuple[str, str]]:
    """Yield corrected lines, each with the action for the hint. More likely corrections come first."""
    pair = _PAIR.fullmatch(line) if len(line) < _MAX_CORRECTED else None
    if pair is None:
        return
    comment = f"  {pair['comment']}" if pair["comment"] else ""
    for value, action in _corrected_values(pair["value"]):
        yield f"{pair['key']} = {value}{comment}", action


def _corrected_values(value: str) -> Iterator[tuple[str, str]]:
    if value.lower() in ("true", "false"):
        yield value.lower(), "write true and false in lower case"
    if value.lower() in ("none", "null"):
        yield '"None"', 'write "None", since TOML has no null'
    if value.translate(_CURLY) != value:
        yield value.translate(_CURLY), "use straight quotes"
    if value[:1] in _CLOSING:
        yield value + _CLOSING[value[0]], f"add the missing {_CLOSING[value[0]]}"
    if value and not _NUMBERS.fullmatch(value):
        bare = value.strip("\"'")
        yield (f"'{bare}'" if "\\" in bare or '"' in bare else f'"{bare}"'), "put quotes around text"
