"""Functions, methods and operators of transform expressions, with limits on their cost and their results."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

MAX_SIZE: Final = 100_000
"""Maximum size of a value: characters plus items, over all levels."""
_MAX_BITS = 2048
_MAX_DIGITS = 100

Function = Callable[..., Any]


class ExpressionError(ValueError):
    """An expression that is not allowed or has no result. The message is part of a longer sentence."""


def size_of(value: Any) -> int:
    """Return the number of characters and items in a value, over all levels.

    Raises ExpressionError above MAX_SIZE.
    """
    total, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 64
        elif isinstance(item, list | tuple):
            total += len(item)
            pending += item if total <= MAX_SIZE else ()
        elif isinstance(item, dict):
            total += sum(map(len, item)) + len(item)
            pending += item.values() if total <= MAX_SIZE else ()
        if total > MAX_SIZE:
            raise too_large()
    return total


def too_large() -> ExpressionError:
    """Return the error for a value that exceeds a limit."""
    return ExpressionError("a value is too large")


def checked_number(value: Any) -> Any:
    """Return the value if JSON can hold it. Raises ExpressionError for a complex or too large number."""
    if isinstance(value, float) and not math.isfinite(value):
        raise too_large()
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise too_large()
    if isinstance(value, complex):
        raise ExpressionError("the result is not a real number")
    return value


def _multiply(left: Any, right: Any) -> Any:
    if isinstance(right, str | list | tuple):
        left, right = right, left
    if isinstance(left, str | list | tuple) and isinstance(right, int):
        _check_size(size_of(left) * right)
    return left * right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        raise ExpressionError("% formats of texts are not allowed")
    return left % right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
        raise too_large()
    return left**right


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise too_large()


BINARY: Final[Mapping[type[ast.operator], Function]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _multiply,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: _modulo,
    ast.Pow: _power,
}

UNARY: Final[Mapping[type[ast.unaryop], Function]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}

COMPARISONS: Final[Mapping[type[ast.cmpop], Function]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


def _round(value: Any, digits: int = 0) -> Any:
    if abs(digits) > _MAX_DIGITS:
        raise too_large()
    return round(value, digits) if digits else round(value)


_BUILT_IN: Final[tuple[Any, ...]] = (int, float, str, bool, list, len, abs, min, max, sorted)
FUNCTIONS: Final[Mapping[str, Function]] = {
    **{function.__name__: function for function in _BUILT_IN},
    "round": _round,
    "sum": lambda values: sum(values),
}


def _replace(text: str, old: str, new: str) -> str:
    _check_size(len(text) + (text.count(old)) * len(new))
    return text.replace(old, new)


def _join(text: str, parts: list[str]) -> str:
    _check_size(size_of(parts) + len(text) * len(parts))
    return text.join(parts)


def _zfill(text: str, width: int) -> str:
    _check_size(width)
    return text.zfill(width)


_STR_METHODS = (
    "split", "rsplit", "splitlines", "strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize",
    "startswith", "endswith", "find", "count", "removeprefix", "removesuffix", "isdigit", "isalpha",
)  # fmt: skip
METHODS: Final[Mapping[type, Mapping[str, Function]]] = {
    str: {
        **{name: getattr(str, name) for name in _STR_METHODS},
        "replace": _replace,
        "join": _join,
        "zfill": _zfill,
    },
    list: {"index": list.index, "count": list.count},
    dict: {
        "get": dict.get,
        "keys": lambda value: list(value),
        "values": lambda value: list(value.values()),
        "items": lambda value: [list(pair) for pair in value.items()],
    },
}
