"""Find the line numbers of the values in a TOML or JSON text. The text must be valid, so parse it before."""

from __future__ import annotations

import json
import re
import tomllib

from buckeye.config.settings import KeyPath

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\]}\n#]+")
_QUOTED = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")|\'\'\'.*?\'{3,5}(?!\')|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL
)


def toml_line_numbers(text: str) -> dict[KeyPath, int]:
    """Return the line number (from 1) of every key, table and list item of a TOML text, by path.

    Raise `RecursionError` for excessive nesting.
    """
    return _TomlScanner(text).scan()


def json_line_numbers(text: str) -> dict[KeyPath, int]:
    """Return the line number (from 1) of every key and list item of a JSON text, by path."""
    scanner = _Scanner(text)
    scanner.value(())
    return scanner.lines


class _Scanner:
    """Scanner of JSON and TOML values.

    It also reads JSON objects as TOML inline tables, which differ only in the sign between key and value.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines: dict[KeyPath, int] = {}
        self._counted = (0, 1)

    def value(self, path: KeyPath) -> None:
        """Read one value, and record the line numbers of the value and of its items."""
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
        """Read `key = value` or `"key": value`. The key may be dotted."""
        path = table
        for key in self.keys():
            path = (*path, key)
            self.note(path)
        self.position += 1  # the sign between key and value
        self.value(path)

    def keys(self) -> list[str]:
        """Read a key and return its parts. A dotted key has several parts."""
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
        """Return the text of a quoted key."""
        return str(json.loads(raw))

    def blank(self) -> None:
        """Skip white space and comments."""
        match = _BLANK.match(self.text, self.position)
        self.position = match.end() if match is not None else self.position

    def note(self, path: KeyPath) -> None:
        """Record the current line as the line of `path`, unless `path` occurred before."""
        position, line = self._counted
        line += self.text.count("\n", position, self.position)
        self._counted = (self.position, line)
        self.lines.setdefault(path, line)

    def _take(self, sign: str) -> bool:
        is_next = self.text.startswith(sign, self.position)
        self.position += len(sign) * is_next
        return is_next

    def _closed(self, bracket: str) -> bool:
        """Skip to the next item. Return True if the closing bracket comes instead."""
        self.blank()
        if self._take(","):
            self.blank()
        return self._take(bracket)


class _TomlScanner(_Scanner):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._counts: dict[KeyPath, int] = {}  # number of items read so far, by path of an array of tables

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
        after, self.position = self.position + len(end), start  # `note` records the line of `position`
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
