"""On which line of a TOML or JSON text each value is written. The text must be valid: parse it first."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator

from buckeye.config.settings import KeyPath

# From a TOML parse error to the line that was meant.

_WHERE = re.compile(r" \(at line (\d+), column (\d+)\)$")
_AT_END = " (at end of document)"
_PAIR = re.compile(r"(?P<key>\s*[\w.\"'-]+?)\s*(?P<sign>==|:=|=|:)\s*(?P<value>.*?)\s*(?P<comment>#.*)?")
_HEADER = re.compile(r"\s*\[+\s*(?P<name>[^\[\]#]*?)\s*\]*\s*(?P<comment>#.*)?")
_CURLY = str.maketrans("“”„‟‘’‚‛", "\"\"\"\"''''")
_LISTED = re.compile(r"[^\s,\[\]{}\"']+(?:\s*,\s*[^\s,\[\]{}\"']+)+")
_CLOSING = {"[": "]", "{": "}", '"': '"', "'": "'"}
_LONGEST_SHOWN = 160
_LONGEST_CORRECTED = 1000


def explain_toml_error(shown: str, text: str, error: tomllib.TOMLDecodeError) -> str:
    """A message with file, line, column, the line itself, and the corrected line where there is one.

    `shown` is how the file is called, `text` its content.
    """
    what, line, column = _locate(text, error)
    message = f"{shown}:{line}:{column}: {_in_words(what)}\n{show_position(text, line, column)}"
    if (earlier := _first_of_two(what, text, line)) is not None:
        return f"{message}\n  It is already set on line {earlier}. Keep one of the two."
    if (fix := _fix(text, line)) is None:
        return message
    where, corrected, hint = fix
    other_line = f" on line {where}" if where != line else ""
    return f"{message}\n  {hint}. Write{other_line}:\n    {corrected.strip()}"


def show_position(text: str, line: int, column: int) -> str:
    """The line (from 1), and a caret under the column (from 1)."""
    lines = text.split("\n")
    content = lines[line - 1].replace("\t", " ") if line <= len(lines) else ""
    start = max(0, column - _LONGEST_SHOWN)
    return f"    {content[start : start + _LONGEST_SHOWN]}\n    {' ' * (column - 1 - start)}^"


def _locate(text: str, error: tomllib.TOMLDecodeError) -> tuple[str, int, int]:
    """What is wrong, and the line and column. An error at the end is shown at the last line with content."""
    message = str(error)
    if (match := _WHERE.search(message)) is not None:
        return message[: match.start()], int(match[1]), int(match[2])
    lines = text.rstrip().split("\n")
    return message.removesuffix(_AT_END), len(lines), len(lines[-1]) + 1


def _in_words(what: str) -> str:
    if what == "Invalid value":
        return "this is not a value in TOML."
    if what.startswith("Illegal character '\\n'"):
        return "the text is not closed on its line."
    return f"not valid TOML: {what}."


def _first_of_two(what: str, text: str, line: int) -> int | None:
    """The line that sets what `line` sets again, if that is the error."""
    if not what.startswith(("Cannot overwrite", "Cannot declare")):
        return None
    lines = text.split("\n")
    name = lines[line - 1].partition("=")[0].split("#")[0].strip()
    found = [i for i, other in enumerate(lines[: line - 1], 1) if _is_named(other, name)]
    return found[-1] if found else None


def _is_named(line: str, name: str) -> bool:
    return line.partition("=")[0].split("#")[0].strip() == name


def _fix(text: str, line: int) -> tuple[int, str, str] | None:
    """(line, corrected line, why): the first correction after which the parser gets beyond the error."""
    lines = text.split("\n")
    for number in _suspects(lines, line):
        for corrected, hint in _candidates(lines[number - 1]):
            changed = "\n".join([*lines[: number - 1], corrected, *lines[number:]])
            if _error_line(changed) > line:
                return number, corrected, hint
    return None


def _suspects(lines: list[str], line: int) -> Iterator[int]:
    """The line of the error, then those above it that open something they do not close."""
    yield line
    for number in range(line - 1, max(0, line - 30), -1):
        content = lines[number - 1]
        if content.count("[") != content.count("]") or content.count("{") != content.count("}"):
            yield number


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
    """Corrections of a line, each with a hint; likelier ones first."""
    if line.lstrip().startswith("[") and len(line) < _LONGEST_CORRECTED:
        yield from _headers(line)
    pair = _PAIR.fullmatch(line) if len(line) < _LONGEST_CORRECTED else None
    if pair is None:
        return
    comment = f"  {pair['comment']}" if pair["comment"] else ""
    for value, hint in _values(pair["value"], wrong_sign=pair["sign"] != "="):
        yield f"{pair['key']} = {value}{comment}", hint
    if pair["comment"]:  # the sign # may belong to the text
        whole = line.partition(pair["sign"])[2].strip()
        yield f"{pair['key']} = {_quoted(whole)}", "Text needs quotes"


def _headers(line: str) -> Iterator[tuple[str, str]]:
    match = _HEADER.fullmatch(line)
    if match is None or not match["name"]:
        return
    name = match["name"] if re.fullmatch(r"[\w.\"'-]+", match["name"]) else f'"{match["name"]}"'
    comment = f"  {match['comment']}" if match["comment"] else ""
    double = line.lstrip().startswith("[[") or "]]" in line
    first, second = (f"[[{name}]]", f"[{name}]") if double else (f"[{name}]", f"[[{name}]]")
    yield first + comment, "Brackets come in pairs"
    yield second + comment, "Brackets come in pairs"


def _values(value: str, *, wrong_sign: bool) -> Iterator[tuple[str, str]]:
    lower = value.lower()
    if wrong_sign:
        yield value, "Names and values are separated by ="
    if lower in ("true", "false"):
        yield lower, "TOML writes true and false in small letters"
    if lower in ("none", "null", "nil"):
        yield '"None"', 'TOML has no null; "None" stands for it'
    if lower in ("yes", "on", "no", "off"):
        yield ("true" if lower in ("yes", "on") else "false"), "TOML has true and false only"
    if re.fullmatch(r"[+-]?(\d[\d_]*\.|\.\d+|\d*\.?\d+[eE][+-]?\d+|0+\d+)", value):
        number = str(int(value)) if value.lstrip("+-").isdigit() else repr(float(value))
        yield number, "A number is written in full"
    if re.fullmatch(r"\d{1,3}(,\d{3})+", value):
        yield value.replace(",", "_"), "Thousands are separated by _"
    if value[-1:] in (",", ";"):
        yield value[:-1].rstrip(), "Nothing follows the value"
    if _LISTED.fullmatch(value):
        yield _as_list(value), "A list needs brackets"
    if value.translate(_CURLY) != value:
        yield value.translate(_CURLY), 'Quotes are straight: "'
    yield from _closed(value)
    if value[:1] in _CLOSING and value[-1:] == _CLOSING[value[0]] and "\\" in value:
        yield f"'{value[1:-1]}'", "Single quotes keep the backslash as it is"
    if value:
        yield _quoted(value.strip("\"'")), "Text needs quotes"


def _closed(value: str) -> Iterator[tuple[str, str]]:
    """Add what is open at the end, or at the start."""
    if value[:1] in _CLOSING:
        yield value + _CLOSING[value[0]], f"A closing {_CLOSING[value[0]]} is missing"
    if value[-1:] in ('"', "'"):
        yield value[-1] + value, f"An opening {value[-1]} is missing"
    if value[:1] == "{":
        yield re.sub(r"(\"[^\"]*\"|'[^']*')\s*:", r"\1 =", value), "Names and values are separated by ="


def _as_list(value: str) -> str:
    items = [item.strip() for item in value.split(",")]
    plain = all(re.fullmatch(r"[+-]?\d+(\.\d+)?|true|false", item) for item in items)
    return "[" + ", ".join(item if plain else _quoted(item) for item in items) + "]"


def _quoted(text: str) -> str:
    return f"'{text}'" if "\\" in text or '"' in text else f'"{text}"'


# On which line of a TOML or JSON text each value is written. The text must be valid: parse it first.

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\]}\n#]+")
_QUOTED = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")|\'\'\'.*?\'{3,5}(?!\')|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL
)


def toml_lines(text: str) -> dict[KeyPath, int]:
    """Path -> line (from 1) of every key, table and list item. Raises RecursionError for absurd nesting."""
    return _TomlScanner(text).scan()


def json_lines(text: str) -> dict[KeyPath, int]:
    """The same for JSON."""
    scanner = _Scanner(text)
    scanner.value(())
    return scanner.lines


class _Scanner:
    """Walks over values. JSON's objects are TOML's inline tables with another sign between key and value."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines: dict[KeyPath, int] = {}
        self._counted = (0, 1)

    def value(self, path: KeyPath) -> None:
        """Read one value and note the lines of it and of all in it."""
        self.blank()
        self.note(path)
        if self._take("["):
            index = 0
            while not self._closed("]"):
                self.value((*path, index))
                index += 1
        elif self._take("{"):
            while not self._closed("}"):
                self.pair(path)
        elif (quoted := _QUOTED.match(self.text, self.position)) is not None:
            self.position = quoted.end()
        elif (bare := _BARE_VALUE.match(self.text, self.position)) is not None:
            self.position = bare.end()

    def pair(self, table: KeyPath) -> None:
        """Read `key = value`, where the key may be dotted."""
        path = table
        for key in self.keys():
            path = (*path, key)
            self.note(path)
        self.position += 1  # the sign between them
        self.value(path)

    def keys(self) -> list[str]:
        """Read a key; a dotted one has several parts. Stops at what follows it."""
        parts = []
        while True:
            self.blank()
            quoted = _QUOTED.match(self.text, self.position)
            match = quoted or _BARE_KEY.match(self.text, self.position)
            assert match is not None, "the text was parsed before"
            parts.append(self.unquote(match[0]) if quoted else match[0])
            self.position = match.end()
            self.blank()
            if not self._take("."):
                return parts

    def unquote(self, raw: str) -> str:
        """What a quoted key stands for."""
        return str(json.loads(raw))

    def blank(self) -> None:
        """Skip white space and comments."""
        match = _BLANK.match(self.text, self.position)
        self.position = match.end() if match is not None else self.position

    def note(self, path: KeyPath) -> None:
        """Remember that `path` is first written here."""
        position, line = self._counted
        line += self.text.count("\n", position, self.position)
        self._counted = (self.position, line)
        self.lines.setdefault(path, line)

    def _take(self, sign: str) -> bool:
        found = self.text.startswith(sign, self.position)
        self.position += len(sign) * found
        return found

    def _closed(self, bracket: str) -> bool:
        """Skip to the next item; True if the bracket closes instead."""
        self.blank()
        if self._take(","):
            self.blank()
        return self._take(bracket)


class _TomlScanner(_Scanner):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._counts: dict[KeyPath, int] = {}  # arrays of tables, and how many items they have so far

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self.note(())
        while self._more():
            if self._take("[["):
                table = self._header("]]")
            elif self._take("["):
                table = self._header("]")
            else:
                self.pair(table)
        return self.lines

    def unquote(self, raw: str) -> str:
        return str(tomllib.loads(f"key = {raw}")["key"])

    def _more(self) -> bool:
        self.blank()
        return self.position < len(self.text)

    def _header(self, end: str) -> KeyPath:
        start = self.position
        keys = self.keys()
        after, self.position = self.position + len(end), start  # the header's own line
        path: KeyPath = ()
        for i, key in enumerate(keys):
            path = (*path, key)
            self.note(path)
            if end == "]]" and i == len(keys) - 1:
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
                self.note(path)
        self.position = after
        return path
