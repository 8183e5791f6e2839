"""Parser of a call as text, `name(1, "two", key=[3])`, with Python and JSON literals only."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Final

_BLANK = re.compile(r"\s*")
_CALL_NAME = re.compile(r"[^\W\d][\w.\-/]*")
_KEYWORD = re.compile(r"([^\W\d][\w.-]*)\s*=(?!=)")
_WORD = re.compile(r"[^\W\d][\w.-]*")
_NUMBER = re.compile(
    r"[+-]?(?:0[xX][0-9a-fA-F]+|(?:0|[1-9](?:_?\d)*)(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)(?![\w.])",
    re.ASCII,
)
_QUOTE = re.compile(r"\"\"\"|'''|\"|'")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
_OCTAL = re.compile(r"[0-7]{1,3}")
_WORDS: Final = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a",
    "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": "",
}  # fmt: skip
_HEX_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}
_CLOSING: Final = {"[": "]", "(": ")", "{": "}"}
MAX_DEPTH: Final = 40
"""Maximum nesting of lists and objects in an argument."""
_MAX_DIGITS = 300
_MAX_SHOWN_CHARS = 24


def shorten(text: str) -> str:
    """Return at most 24 characters of the model's text, for a message."""
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


class LiteralError(ValueError):
    """Text that is not a valid literal. `position` is the index of the error in the text."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


@dataclass(slots=True)
class CallText:
    """A parsed call. `end` is the index after its closing parenthesis."""

    name: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    end: int = 0


def read_call(text: str, position: int) -> CallText:
    """Parse the call at `position`, or after white space there. Raises LiteralError and no other exception.

    Tuples become lists, as in JSON. The keys of an object are strings. Strings may contain newlines.
    """
    return _Reader(text, position).call()


class _Reader:
    """Recursive descent parser of one call in a text."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position

    def error(self, message: str, position: int | None = None) -> LiteralError:
        """Return an error that quotes the text at `position`, or at the current position."""
        at = self.position if position is None else position
        found = shorten(self.text[at : at + _MAX_SHOWN_CHARS + 1].partition("\n")[0])
        return LiteralError(f"{message}, found {found!r}" if found else f"{message}, but the text ends", at)

    def blank(self) -> None:
        match = _BLANK.match(self.text, self.position)
        self.position = match.end() if match is not None else self.position

    def take(self, sign: str) -> bool:
        is_next = self.text.startswith(sign, self.position)
        self.position += len(sign) * is_next
        return is_next

    def call(self) -> CallText:
        self.blank()
        name = _CALL_NAME.match(self.text, self.position)
        if name is None:
            raise self.error("expected a call such as name(...)")
        self.position = name.end()
        self.blank()
        call = CallText(name[0])
        if not self.take("("):
            raise self.error(f"expected ( after {shorten(name[0])}")
        while not self.closed(")"):
            self.argument(call)
            self.separator(")")
        call.end = self.position
        return call

    def argument(self, call: CallText) -> None:
        keyword = _KEYWORD.match(self.text, self.position)
        start = self.position
        if keyword is None:
            if call.kwargs:
                raise self.error("an argument without a name must not follow an argument with a name")
            call.args.append(self.value(0))
            return
        self.position = keyword.end()
        value = self.value(0)
        if keyword[1] in call.kwargs:
            raise self.error(f"{shorten(keyword[1])} is given twice", start)
        call.kwargs[keyword[1]] = value

    def closed(self, bracket: str) -> bool:
        self.blank()
        return self.take(bracket)

    def separator(self, bracket: str) -> None:
        """Consume the comma between two items. A trailing comma is allowed."""
        self.blank()
        if not self.take(",") and not self.text.startswith(bracket, self.position):
            raise self.error(f"expected , or {bracket}")

    def value(self, depth: int) -> Any:
        self.blank()
        sign = self.text[self.position : self.position + 1]
        if sign in _CLOSING:
            if depth == MAX_DEPTH:
                raise self.error("nested too deeply")
            self.position += 1
            return self.mapping(depth + 1) if sign == "{" else self.items(sign, depth + 1)
        if (quote := _QUOTE.match(self.text, self.position)) is not None:
            return self.string(quote[0])
        if (number := _NUMBER.match(self.text, self.position)) is not None:
            return self.number(number[0])
        word = _WORD.match(self.text, self.position)
        if word is None:
            raise self.error("expected a value")
        if word[0] not in _WORDS:
            message = f"{shorten(word[0])} is not a value; put text in quotes"
            raise LiteralError(message, word.start())
        self.position = word.end()
        return _WORDS[word[0]]

    def items(self, bracket: str, depth: int) -> Any:
        """Parse a list or tuple. `(1)` is the number 1, and `(1,)` is a list."""
        closing = _CLOSING[bracket]
        items, has_comma = [], False
        while not self.closed(closing):
            items.append(self.value(depth))
            self.separator(closing)
            has_comma = has_comma or self.text[self.position - 1] == ","
        return items[0] if bracket == "(" and len(items) == 1 and not has_comma else items

    def mapping(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self.closed("}"):
            start = self.position
            quote = _QUOTE.match(self.text, self.position)
            if quote is None:
                raise self.error("the keys of an object must be in quotes")
            key = self.string(quote[0])
            self.blank()
            if not self.take(":"):
                raise self.error(f"expected : after the key {shorten(key)!r}")
            if key in values:
                raise self.error(f"the key {shorten(key)!r} appears twice", start)
            values[key] = self.value(depth)
            self.separator("}")
        return values

    def number(self, digits: str) -> int | float:
        if len(digits) > _MAX_DIGITS:
            raise self.error("the number is too long")
        if "x" in digits.lower():
            value: int | float = int(digits, 16)
        else:
            value = float(digits) if re.search(r"[.eE]", digits) else int(digits)
        if not math.isfinite(value):
            raise self.error("the number is too large")
        self.position += len(digits)
        return value

    def string(self, quote: str) -> str:
        """Parse the string at the current position, which is at the opening `quote`."""
        start = self.position
        self.position += len(quote)
        plain = re.compile(rf"[^\\{quote[0]}]+")
        parts = []
        while not self.take(quote):
            if (run := plain.match(self.text, self.position)) is not None:
                parts.append(run[0])
                self.position = run.end()
            elif self.take("\\"):
                parts.append(self.escape())
            elif self.position < len(self.text):  # a quote inside triple quotes
                parts.append(self.text[self.position])
                self.position += 1
            else:
                raise self.error(f"the text that begins here has no closing {quote}", start)
        text = "".join(parts)
        if not text.isascii() and re.search("[\ud800-\udfff]", text):
            text = self.join_surrogates(text, start)
        return text

    def join_surrogates(self, text: str, start: int) -> str:
        """Return the text with each of JSON's surrogate pairs joined to one character."""
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise self.error("the text has half of a character (a lone surrogate)", start) from None

    def escape(self) -> str:
        """Return the character of the escape after a backslash. Keep unknown escapes."""
        sign = self.text[self.position : self.position + 1]
        if sign in _HEX_LENGTHS:
            digits = _HEXADECIMAL.match(self.text, self.position + 1, self.position + 1 + _HEX_LENGTHS[sign])
            if digits is None or len(digits[0]) != _HEX_LENGTHS[sign] or int(digits[0], 16) > 0x10FFFF:
                raise self.error(f"expected {_HEX_LENGTHS[sign]} hexadecimal digits", self.position - 1)
            self.position = digits.end()
            return chr(int(digits[0], 16))
        if (octal := _OCTAL.match(self.text, self.position)) is not None:
            self.position = octal.end()
            return chr(int(octal[0], 8))
        self.position += len(sign)
        return _ESCAPES.get(sign, f"\\{sign}")
