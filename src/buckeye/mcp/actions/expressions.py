"""Transforms of a mapping: a small expression language with Python's syntax.

The syntax is `lambda x: ...`, `lambda x, ctx: ...`, or only the part after the colon. The language has
literals, arithmetic, comparisons, and / or / not, conditions, subscripts, and the functions and methods of
`operations`. It has no loops, attributes, assignments or other names. Expressions are interpreted from their
syntax tree; Python never runs them. Sizes are bounded, so an expression can neither hang nor fill the memory.
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
    checked_value,
)

_MAX_SOURCE_CHARS = 1000
_MAX_DEPTH = 40
_MAX_MESSAGE_CHARS = 120
_VALUE, _CONTEXT = "x", "ctx"
_OPERATORS: Final = (ast.operator, ast.unaryop, ast.cmpop)
_OPERATIONS: Final = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.boolop, ast.Compare, ast.IfExp)
_VALUES: Final = (ast.Subscript, ast.Slice, ast.List, ast.Tuple, ast.expr_context)
_CONSTANTS: Final = (str, int, float, bool, type(None))
_PYTHON_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Transform:
    """A checked expression. `names` are its parameters: the value and perhaps the call's arguments."""

    source: str
    names: tuple[str, ...]
    body: ast.expr

    def __call__(self, value: Any, context: Mapping[str, Any]) -> Any:
        """Return the result for a value, as a JSON value. Raises ExpressionError."""
        result = evaluate(self.body, dict(zip(self.names, (value, dict(context)), strict=False)))
        return _as_json(result)


def compile_transform(source: str, *, use_context: bool) -> Transform:
    """Check an expression and return it. Raises ExpressionError that names the disallowed part."""
    if len(source) > _MAX_SOURCE_CHARS:
        raise ExpressionError(f"longer than {_MAX_SOURCE_CHARS} characters")
    try:
        with warnings.catch_warnings():  # such as a warning of an unknown escape
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
    elif isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ExpressionError("keys of an object must be strings in quotes")
    elif isinstance(node, _OPERATORS):
        if type(node) not in (*BINARY, *UNARY, *COMPARISONS):
            raise ExpressionError(f"the operation {type(node).__name__} is not allowed")
    elif not isinstance(node, _OPERATIONS + _VALUES):
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


def _describe_node(node: ast.AST) -> str:
    kinds = {ast.Attribute: "an attribute", ast.Lambda: "a nested lambda", ast.NamedExpr: "an assignment"}
    return kinds.get(type(node), type(node).__name__)


def _as_json(value: Any) -> Any:
    """Return the value with tuples as lists. All other values of the language are JSON already."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return value


def evaluate(body: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a checked expression. Raises ExpressionError and no other exception.

    `names` maps names to JSON values.
    """
    try:
        for value in names.values():
            checked_value(value)
        return _value(body, names)
    except ExpressionError:
        raise
    except KeyError as error:
        raise ExpressionError(_truncate(f"there is no {error}")) from None
    except _PYTHON_ERRORS as error:
        raise ExpressionError(_truncate(str(error))) from None


def _truncate(message: str) -> str:
    """Return a message cut to a bounded length, because Python's messages repeat the value."""
    return message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}…"


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names[node.id]
        case ast.BinOp():
            return checked_value(BINARY[type(node.op)](_value(node.left, names), _value(node.right, names)))
        case ast.UnaryOp():
            return checked_value(UNARY[type(node.op)](_value(node.operand, names)))
        case ast.BoolOp():
            return _boolean(node, names)
        case ast.Compare():
            return _comparison(node, names)
        case ast.IfExp():
            return _value(node.body if _value(node.test, names) else node.orelse, names)
        case ast.Subscript():
            return checked_value(_value(node.value, names)[_index(node.slice, names)])
        case ast.Call():
            return checked_value(_call(node, names))
        case ast.List():
            return checked_value([_value(item, names) for item in node.elts])
        case ast.Tuple():
            return checked_value(tuple(_value(item, names) for item in node.elts))
        case ast.Dict():
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            values = [_value(item, names) for item in node.values]
            return checked_value(dict(zip(keys, values, strict=True)))
    raise ExpressionError(f"{type(node).__name__} is not allowed")


def _boolean(node: ast.BoolOp, names: Mapping[str, Any]) -> Any:
    value: Any = None
    for part in node.values:
        value = _value(part, names)
        if bool(value) is isinstance(node.op, ast.Or):
            return value
    return value


def _comparison(node: ast.Compare, names: Mapping[str, Any]) -> bool:
    left = _value(node.left, names)
    for sign, part in zip(node.ops, node.comparators, strict=True):
        right = _value(part, names)
        if not COMPARISONS[type(sign)](left, right):
            return False
        left = right
    return True


def _index(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if not isinstance(node, ast.Slice):
        return _value(node, names)
    bounds = (node.lower, node.upper, node.step)
    return slice(*(None if bound is None else _value(bound, names) for bound in bounds))


def _call(node: ast.Call, names: Mapping[str, Any]) -> Any:
    arguments = [_value(argument, names) for argument in node.args]
    if isinstance(node.func, ast.Name):
        return FUNCTIONS[node.func.id](*arguments)
    assert isinstance(node.func, ast.Attribute), "the expression was checked"
    owner = _value(node.func.value, names)
    function = METHODS.get(type(owner), {}).get(node.func.attr)
    if function is None:
        raise ExpressionError(f"{type(owner).__name__} has no {node.func.attr}")
    return function(owner, *arguments)
