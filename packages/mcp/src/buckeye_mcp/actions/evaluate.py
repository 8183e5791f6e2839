"""Walks a checked expression."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from buckeye_mcp.actions.operations import (
    BINARY,
    COMPARISONS,
    FUNCTIONS,
    METHODS,
    UNARY,
    ExpressionError,
    checked_number,
    size_of,
)

_MAX_WORK = 1_000_000
_STEP = 20
_LONGEST_MESSAGE = 120
_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def evaluate(body: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression that was checked. Raises ExpressionError, and nothing else.

    `names` holds JSON values.
    """
    try:
        for value in names.values():
            size_of(value)
        return _Evaluation().value(body, names)
    except ExpressionError:
        raise
    except KeyError as error:
        raise ExpressionError(_short(f"there is no {error}")) from None
    except _FAULTS as error:
        raise ExpressionError(_short(str(error))) from None


def _short(message: str) -> str:
    """Python's messages repeat the value, however long."""
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…"


class _Evaluation:
    """One evaluation, and the work it has done: some for each step, and the size of every value made."""

    def __init__(self) -> None:
        self.work = 0

    def charge(self, work: int) -> None:
        self.work += work
        if self.work > _MAX_WORK:
            raise ExpressionError("it takes too long")

    def made(self, value: Any) -> Any:
        """Note a value that was made. Raises ExpressionError if it is too large."""
        self.charge(size_of(value))
        return checked_number(value)

    def value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        self.charge(_STEP)
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[node.id]
            case ast.BinOp():
                return self.binary(node, names)
            case ast.UnaryOp():
                return self.made(UNARY[type(node.op)](self.value(node.operand, names)))
            case ast.BoolOp():
                return self.boolean(node, names)
            case ast.Compare():
                return self.comparison(node, names)
            case ast.IfExp():
                return self.value(node.body if self.value(node.test, names) else node.orelse, names)
            case ast.Subscript():
                return self.made(self.value(node.value, names)[self.index(node.slice, names)])
            case ast.Call():
                return self.call(node, names)
            case ast.ListComp():
                return self.comprehension(node, names)
            case _:
                return self.made(self.display(node, names))

    def display(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        """A list, tuple, object or f-string."""
        match node:
            case ast.List() | ast.Tuple():
                items = [self.value(item, names) for item in node.elts]
                return items if isinstance(node, ast.List) else tuple(items)
            case ast.Dict():
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                values = [self.value(item, names) for item in node.values]
                return dict(zip(keys, values, strict=True))
            case ast.JoinedStr():
                return "".join(self.part(part, names) for part in node.values)
        raise ExpressionError(f"{type(node).__name__} is not allowed")

    def part(self, node: ast.expr, names: Mapping[str, Any]) -> str:
        """One part of an f-string."""
        if isinstance(node, ast.FormattedValue):
            return self.text(self.value(node.value, names))
        return str(self.value(node, names))

    def text(self, value: Any) -> str:
        """A value as a text, charged beforehand."""
        self.charge(size_of(value))
        text = str(value)
        self.made(text)
        return text

    def binary(self, node: ast.BinOp, names: Mapping[str, Any]) -> Any:
        left, right = self.value(node.left, names), self.value(node.right, names)
        return self.made(BINARY[type(node.op)](left, right))

    def boolean(self, node: ast.BoolOp, names: Mapping[str, Any]) -> Any:
        stops_at = isinstance(node.op, ast.Or)
        value: Any = None
        for part in node.values:
            value = self.value(part, names)
            if bool(value) is stops_at:
                return value
        return value

    def comparison(self, node: ast.Compare, names: Mapping[str, Any]) -> bool:
        left = self.value(node.left, names)
        for sign, part in zip(node.ops, node.comparators, strict=True):
            right = self.value(part, names)
            self.charge(size_of(left) + size_of(right))
            if not COMPARISONS[type(sign)](left, right):
                return False
            left = right
        return True

    def index(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        if not isinstance(node, ast.Slice):
            return self.value(node, names)
        bounds = (node.lower, node.upper, node.step)
        return slice(*(None if bound is None else self.value(bound, names) for bound in bounds))

    def call(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        arguments = [self.value(argument, names) for argument in node.args]
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, names)
            function = METHODS.get(type(owner), {}).get(node.func.attr)
            if function is None:
                raise ExpressionError(f"{type(owner).__name__} has no {node.func.attr}")
            arguments.insert(0, owner)
        else:
            assert isinstance(node.func, ast.Name), "the expression was checked"
            function = FUNCTIONS[node.func.id]
        self.charge(sum(map(size_of, arguments)))
        return self.made(function(*arguments))

    def comprehension(self, node: ast.ListComp, names: Mapping[str, Any]) -> list[Any]:
        (loop,) = node.generators
        assert isinstance(loop.target, ast.Name), "the expression was checked"
        items = self.value(loop.iter, names)
        if not isinstance(items, list | tuple | str):
            raise ExpressionError(f"for needs a list, not {type(items).__name__}")
        found = []
        for item in items:
            inner = {**names, loop.target.id: item}
            if all(self.value(test, inner) for test in loop.ifs):
                found.append(self.value(node.elt, inner))
        return self.made(found)
