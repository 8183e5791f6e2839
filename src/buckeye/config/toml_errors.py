"""TOML parse errors, with the line and its correction."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

_WHERE = re.compile(r" \(at line (\d+), column (\d+)\)$")
_NUMBERS = re.compile(r"[\d\s.,_+-]+(e[+-]?\d+)?[,;]?", re.I)
_AT_END = " (at end of document)"
_PAIR = re.compile(r"(?P<key>\s*[\w.\"'-]+?)\s*=\s*(?P<value>.*?)\s*(?P<comment>#.*)?")
_CURLY = str.maketrans("“”„‟‘’‚‛", "\"\"\"\"''''")
_CLOSING = {"[": "]", "{": "}", '"': '"', "'": "'"}
_LONGEST_SHOWN = 160
_LONGEST_CORRECTED = 1000


def explain_toml_error(shown: str, text: str, error: tomllib.TOMLDecodeError) -> str:
    """Return a message with file, line, column, the line itself, and the corrected line if there is one.

    `shown` is the file's name, `text` its content.
    """
    what, line, column = _locate(text, error)
    reason = "this is not a value in TOML" if what == "Invalid value" else f"not valid TOML: {what}"
    message = f"{shown}:{line}:{column}: {reason}.\n{show_position(text, line, column)}"
    lines = text.split("\n")
    for corrected, hint in _candidates(lines[line - 1]):
        if _error_line("\n".join([*lines[: line - 1], corrected, *lines[line:]])) > line:
            return f"{message}\n  {hint}. Write:\n    {corrected.strip()}"
    return message


def show_position(text: str, line: int, column: int) -> str:
    """Return the line (from 1), with a caret under the column (from 1)."""
    lines = text.split("\n")
    content = lines[line - 1].replace("\t", " ") if line <= len(lines) else ""
    start = max(0, column - _LONGEST_SHOWN)
    return f"    {content[start : start + _LONGEST_SHOWN]}\n    {' ' * (column - 1 - start)}^"


def _locate(text: str, error: tomllib.TOMLDecodeError) -> tuple[str, int, int]:
    """Return the error, its line and its column. An error at the end is reported at the last line with
    content.
    """
    message = str(error)
    if (match := _WHERE.search(message)) is not None:
        return message[: match.start()], int(match[1]), int(match[2])
    lines = text.rstrip().split("\n")
    return message.removesuffix(_AT_END), len(lines), len(lines[-1]) + 1


def _error_line(text: str) -> float:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _WHERE.search(str(error))
        return int(match[1]) if match is not None else 0.0
    except (ValueError, RecursionError):
        return 0.0
    return float("inf")


def _candidates(line: str) -> Iterator[tuple[str, str]]:
    """Yield corrections of a line, each with a hint; more likely ones first."""
    pair = _PAIR.fullmatch(line) if len(line) < _LONGEST_CORRECTED else None
    if pair is None:
        return
    comment = f"  {pair['comment']}" if pair["comment"] else ""
    for value, hint in _values(pair["value"]):
        yield f"{pair['key']} = {value}{comment}", hint


def _values(value: str) -> Iterator[tuple[str, str]]:
    if value.lower() in ("true", "false"):
        yield value.lower(), "TOML writes true and false in small letters"
    if value.lower() in ("none", "null"):
        yield '"None"', 'TOML has no null; "None" stands for it'
    if value.translate(_CURLY) != value:
        yield value.translate(_CURLY), 'Quotes are straight: "'
    if value[:1] in _CLOSING:
        yield value + _CLOSING[value[0]], f"A closing {_CLOSING[value[0]]} is missing"
    if value and not _NUMBERS.fullmatch(value):
        bare = value.strip("\"'")
        yield (f"'{bare}'" if "\\" in bare or '"' in bare else f'"{bare}"'), "Text needs quotes"
