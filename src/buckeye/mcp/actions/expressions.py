"""Check and evaluate the `transform` of an argument: a small expression language with Python's syntax.

The syntax is `lambda x: ...`, `lambda x, ctx: ...`, or only the part after the colon. The language has
literals, arithmetic, comparisons, and / or / not, conditions, subscripts, f-strings, list comprehensions, and
the functions and methods of `operations`. Attributes, assignments and all other names are errors. This module
interprets the syntax tree of an expression, so Python never runs the expression. Limits on steps and sizes
keep an expression from hanging or filling the memory.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from buckeye.mcp.actions.operations import (
    BINARY,
    COMPARISONS,
    FUNCTIONS,
    METHODS,
    UNARY,
    ExpressionError,
    checked_number,
    size_of,
)

_MAX_SOURCE_CHARS = 1000
_MAX_DEPTH = 40
_MAX_WORK = 1_000_000
_STEP_WORK = 20
_MAX_MESSAGE_CHARS = 120
_VALUE, _CONTEXT = "x", "ctx"
_PLAIN: Final = (ast.BoolOp, ast.boolop, ast.IfExp, ast.Compare, ast.Subscript, ast.Slice)
_DISPLAYS: Final = (ast.List, ast.Tuple, ast.JoinedStr, ast.expr_context)
_CONSTANTS: Final = (str, int, float, bool, type(None))
_PYTHON_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Transform:
    """A checked expression. `names` are its parameters: the value and perhaps the call's arguments."""

    source: str
    names: tuple[str, ...]
    body: ast.expr

    def __call__(self, value: Any, context: Mapping[str, Any]) -> Any:
        """Return the transformed value as a JSON value. Raises ExpressionError."""
        result = evaluate(self.body, dict(zip(self.names, (value, dict(context)), strict=False)))
        return _as_json(result)


def compile_transform(source: str, *, use_context: bool) -> Transform:
    """Return the checked expression of `source`. Raises ExpressionError with the part that is not allowed."""
    if len(source) > _MAX_SOURCE_CHARS:
        raise ExpressionError(f"longer than {_MAX_SOURCE_CHARS} characters")
    try:
        with warnings.catch_warnings():  # of Python, for example about an unknown escape
            warnings.simplefilter("ignore")
            tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "nested too deeply"
        raise ExpressionError(f"not a valid expression: {reason}") from None
    names, body = _parameters(tree, use_context)
    _check(body, set(names), 0)
    return Transform(source, names, body)


def _parameters(tree: ast.expr, use_context: bool) -> tuple[tuple[str, ...], ast.expr]:
    if not isinstance(tree, ast.Lambda):
        return ((_VALUE, _CONTEXT) if use_context else (_VALUE,)), tree
    args = tree.args
    unsupported = (args.posonlyargs, args.kwonlyargs, args.vararg, args.kwarg, args.defaults)
    names = tuple(argument.arg for argument in args.args)
    if any(unsupported) or len(names) not in (1, 2):
        raise ExpressionError("write lambda x: ..., or lambda x, ctx: ... with use_context: true")
    if len(names) == 2 and not use_context:
        raise ExpressionError(f"a second parameter ({names[1]}) needs use_context: true")
    return names, tree.body


def _check(node: ast.AST, names: set[str], depth: int) -> None:
    """Raise ExpressionError if the tree contains anything outside the language."""
    if depth > _MAX_DEPTH:
        raise ExpressionError("nested too deeply")
    if isinstance(node, ast.Call):
        _check_call(node, names, depth)
        return
    if isinstance(node, ast.ListComp):
        _check_comprehension(node, names, depth)
        return
    _check_node(node, names)
    for child in ast.iter_child_nodes(node):
        _check(child, names, depth + 1)


def _check_node(node: ast.AST, names: set[str]) -> None:
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ExpressionError(f"unknown name {node.id!r}; use {', '.join(sorted(names))}")
    elif isinstance(node, ast.Constant):
        if type(node.value) not in _CONSTANTS:
            raise ExpressionError(f"{node.value!r} is not allowed")
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise ExpressionError("a number is too large")
    elif isinstance(node, ast.FormattedValue):
        if node.format_spec is not None or node.conversion != -1:
            raise ExpressionError("formats such as {x:5} or {x!r} are not allowed")
    elif isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ExpressionError("keys of an object must be strings in quotes")
    elif isinstance(node, ast.BinOp | ast.UnaryOp):
        if type(node.op) not in (BINARY if isinstance(node, ast.BinOp) else UNARY):
            raise ExpressionError(f"the operation {type(node.op).__name__} is not allowed")
    elif isinstance(node, ast.operator | ast.unaryop):
        return
    elif isinstance(node, ast.cmpop):
        if type(node) not in COMPARISONS:
            raise ExpressionError(f"the comparison {type(node).__name__} is not allowed")
    elif not isinstance(node, _PLAIN + _DISPLAYS):
        raise ExpressionError(f"{_describe_node(node)} is not allowed")


def _check_call(node: ast.Call, names: set[str], depth: int) -> None:
    if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise ExpressionError("arguments with names or stars are not allowed")
    function = node.func
    if isinstance(function, ast.Attribute):
        if not any(function.attr in methods for methods in METHODS.values()):
            raise ExpressionError(f"the method {function.attr!r} is not allowed")
        _check(function.value, names, depth + 1)
    elif not isinstance(function, ast.Name) or function.id not in FUNCTIONS or function.id in names:
        name = repr(function.id) if isinstance(function, ast.Name) else "the called value"
        raise ExpressionError(f"{name} is not a function; use one of {', '.join(FUNCTIONS)}")
    for argument in node.args:
        _check(argument, names, depth + 1)


def _check_comprehension(node: ast.ListComp, names: set[str], depth: int) -> None:
    loop = node.generators[0]
    if len(node.generators) != 1 or loop.is_async:
        raise ExpressionError("only one `for` is allowed")
    if not isinstance(loop.target, ast.Name):
        raise ExpressionError("only a single name is allowed after `for`")
    _check(loop.iter, names, depth + 1)
    for part in (node.elt, *loop.ifs):
        _check(part, {*names, loop.target.id}, depth + 1)


def _describe_node(node: ast.AST) -> str:
    kinds = {ast.Attribute: "an attribute", ast.Lambda: "a nested lambda", ast.NamedExpr: "an assignment"}
    return kinds.get(type(node), type(node).__name__)


def _as_json(value: Any) -> Any:
    """Return the value with tuples as lists. All other values of the language are JSON values."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return value


def evaluate(body: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a checked expression. Raises ExpressionError and no other exception.

    `names` maps the parameters of the expression to JSON values.
    """
    try:
        for value in names.values():
            size_of(value)
        return _Evaluation().value(body, names)
    except ExpressionError:
        raise
    except KeyError as error:
        raise ExpressionError(_truncate(f"no key {error}")) from None
    except _PYTHON_ERRORS as error:
        raise ExpressionError(_truncate(str(error))) from None


def _truncate(message: str) -> str:
    """Return the beginning of a message. Python's messages may repeat a long value."""
    return message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}…"


class _Evaluation:
    """Evaluation of one expression. `work` adds up a cost per step and the sizes of all new values."""

    def __init__(self) -> None:
        self.work = 0

    def charge(self, work: int) -> None:
        self.work += work
        if self.work > _MAX_WORK:
            raise ExpressionError("the expression takes too long")

    def charge_value(self, value: Any) -> Any:
        """Add the size of a new value to `work`, and return the value. Raises ExpressionError at a limit."""
        self.charge(size_of(value))
        return checked_number(value)

    def value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        self.charge(_STEP_WORK)
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[node.id]
            case ast.BinOp():
                left, right = self.value(node.left, names), self.value(node.right, names)
                return self.charge_value(BINARY[type(node.op)](left, right))
            case ast.UnaryOp():
                return self.charge_value(UNARY[type(node.op)](self.value(node.operand, names)))
            case ast.BoolOp():
                return self.boolean(node, names)
            case ast.Compare():
                return self.comparison(node, names)
            case ast.IfExp():
                return self.value(node.body if self.value(node.test, names) else node.orelse, names)
            case ast.Subscript():
                return self.charge_value(self.value(node.value, names)[self.index(node.slice, names)])
            case ast.Call():
                return self.call(node, names)
            case ast.ListComp():
                return self.comprehension(node, names)
            case _:
                return self.charge_value(self.display(node, names))

    def display(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        """Return the value of a list, tuple, object, f-string or part of an f-string."""
        match node:
            case ast.List() | ast.Tuple():
                items = [self.value(item, names) for item in node.elts]
                return items if isinstance(node, ast.List) else tuple(items)
            case ast.Dict():
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                values = [self.value(item, names) for item in node.values]
                return dict(zip(keys, values, strict=True))
            case ast.JoinedStr():
                return "".join(self.value(part, names) for part in node.values)
            case ast.FormattedValue():
                value = self.value(node.value, names)
                self.charge(size_of(value))  # checks the size before `str` copies the value
                return str(value)
        raise ExpressionError(f"{type(node).__name__} is not allowed")

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
        return self.charge_value(function(*arguments))

    def comprehension(self, node: ast.ListComp, names: Mapping[str, Any]) -> list[Any]:
        (loop,) = node.generators
        assert isinstance(loop.target, ast.Name), "the expression was checked"
        items = self.value(loop.iter, names)
        if not isinstance(items, list | tuple | str):
            raise ExpressionError(f"for needs a list, not {type(items).__name__}")
        results = []
        for item in items:
            inner = {**names, loop.target.id: item}
            if all(self.value(test, inner) for test in loop.ifs):
                results.append(self.value(node.elt, inner))
        return self.charge_value(results)
