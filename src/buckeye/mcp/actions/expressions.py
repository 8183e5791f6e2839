"""The transforms of a mapping: expressions of Python, checked against a short list of what they may hold.

`lambda x: ...`, `lambda x, ctx: ...`, or only what follows the colon. An expression has literals, arithmetic,
comparisons, and / or / not, conditions, subscripts, f-strings, list comprehensions (none within another), and
the functions and methods listed here; no attributes, no assignments, no other names.

Who writes the configuration writes the expression. The model writes the values: their size is bounded, and so
is what operators make of them.
"""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

MAX_SIZE: Final = 10_000
"""Most characters of a value as JSON."""
_MAX_RESULT = 10 * MAX_SIZE
_MAX_BITS = 2048
_MAX_DIGITS = 100
_LONGEST_SOURCE = 1000
_LONGEST_MESSAGE = 120
_MAX_DEPTH = 40
_VALUE, _CONTEXT = "x", "ctx"
_NODES: Final = (
    ast.BoolOp, ast.boolop, ast.IfExp, ast.Compare, ast.cmpop, ast.Subscript, ast.Slice, ast.List, ast.Tuple,
    ast.JoinedStr, ast.expr_context, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow,
    ast.BinOp, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd,
)  # fmt: skip
_CONSTANTS: Final = (str, int, float, bool, type(None))
_METHODS: Final = frozenset(
    "split rsplit splitlines strip lstrip rstrip lower upper title capitalize startswith endswith find count "  # noqa: SIM905
    "removeprefix removesuffix isdigit isalpha replace join index get keys values items".split()
)


class ExpressionError(ValueError):
    """An expression that is not allowed, or has no result; the text is one half sentence."""


def _round(value: Any, digits: int = 0) -> Any:
    if abs(digits) > _MAX_DIGITS:
        raise ExpressionError("a value is too large")
    return round(value, digits) if digits else round(value)


def _multiply(left: Any, right: Any) -> Any:
    for sized, count in ((left, right), (right, left)):
        if isinstance(sized, str | list | tuple) and isinstance(count, int) and len(sized) * count > MAX_SIZE:
            raise ExpressionError("a value is too large")
    return left * right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        raise ExpressionError("a text has no remainder")
    return left % right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
        raise ExpressionError("a value is too large")
    return left**right


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, list, len, abs, min, max, sorted, sum)},
    "round": _round,
}
_BOUNDED: Final[Mapping[type[ast.operator], Callable[..., Any]]] = {
    ast.Mult: _multiply,
    ast.Mod: _modulo,
    ast.Pow: _power,
}
"""Operators of which a short value makes a long one; none of their names can be written."""
_GLOBALS: Final = {
    "__builtins__": {},
    **_FUNCTIONS,
    **{f"{kind.__name__}()": do for kind, do in _BOUNDED.items()},
}


@dataclass(frozen=True, slots=True)
class Transform:
    """A checked expression. `names` are its parameters: the value and, if two, the arguments of the call."""

    names: tuple[str, ...]
    code: CodeType

    def __call__(self, value: Any, context: Mapping[str, Any]) -> Any:
        """Return the result for a value, as a JSON value. Raises ExpressionError, and nothing else."""
        given = dict(zip(self.names, (value, dict(context)), strict=False))
        try:
            _as_json(given, MAX_SIZE)
            return _as_json(eval(self.code, {**_GLOBALS, **given}), _MAX_RESULT)  # noqa: S307  it was checked
        except KeyError as error:
            raise ExpressionError(_short(f"there is no {error}")) from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ExpressionError(_short(str(error))) from None


def _as_json(value: Any, most: int) -> Any:
    """Return a copy of a value, with lists in place of tuples."""
    text = json.dumps(value, allow_nan=False)
    if len(text) > most:
        raise ExpressionError("a value is too large")
    return json.loads(text)


def _short(message: str) -> str:
    """Python's messages repeat the value, however long."""
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…"


class _Bound(ast.NodeTransformer):
    """Calls of our functions in place of the operators that they bound."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if type(node.op) not in _BOUNDED:
            return node
        name = ast.Name(f"{type(node.op).__name__}()", ast.Load())
        return ast.Call(name, [node.left, node.right], [])


def compile_transform(source: str, *, use_context: bool) -> Transform:
    """Check an expression. Raises ExpressionError that says what is not allowed."""
    if len(source) > _LONGEST_SOURCE:
        raise ExpressionError(f"it is longer than {_LONGEST_SOURCE} characters")
    try:
        with warnings.catch_warnings():  # such as that of an unknown escape
            warnings.simplefilter("ignore")
            tree = ast.parse(source.strip(), mode="eval").body
            names, body = _parameters(tree, use_context)
            _check(body, set(names), 0)
            bounded = ast.fix_missing_locations(ast.Expression(_Bound().visit(body)))
            return Transform(names, compile(bounded, "transform", "eval"))
    except ExpressionError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "nested too deeply"
        raise ExpressionError(f"it is no expression: {reason}") from None


def _parameters(tree: ast.expr, use_context: bool) -> tuple[tuple[str, ...], ast.expr]:
    if not isinstance(tree, ast.Lambda):
        return ((_VALUE, _CONTEXT) if use_context else (_VALUE,)), tree
    given = tree.args
    rest = (given.posonlyargs, given.kwonlyargs, given.vararg, given.kwarg, given.defaults)
    names = tuple(argument.arg for argument in given.args)
    if any(rest) or len(names) not in (1, 2) or any(name.startswith("_") for name in names):
        raise ExpressionError("write lambda x: ..., or lambda x, ctx: ... with use_context: true")
    if len(names) == 2 and not use_context:
        raise ExpressionError(f"a second parameter ({names[1]}) needs use_context: true")
    return names, tree.body


def _check(node: ast.AST, names: set[str], depth: int) -> None:
    """Raise ExpressionError for anything in the tree that is not of the language."""
    if depth > _MAX_DEPTH:
        raise ExpressionError("it is nested too deeply")
    if isinstance(node, ast.Call):
        _check_call(node, names, depth)
        return
    if isinstance(node, ast.ListComp):
        _check_comprehension(node, names, depth)
        return
    _check_one(node, names)
    for child in ast.iter_child_nodes(node):
        _check(child, names, depth + 1)


def _check_one(node: ast.AST, names: set[str]) -> None:
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ExpressionError(f"there is no {node.id!r}; there are {', '.join(sorted(names))}")
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
            raise ExpressionError("the keys of an object are texts in quotes")
    elif not isinstance(node, _NODES):
        raise ExpressionError(f"{_named(node)} is not allowed")


def _check_call(node: ast.Call, names: set[str], depth: int) -> None:
    if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise ExpressionError("arguments with names or stars are not allowed")
    function = node.func
    if isinstance(function, ast.Attribute):
        if function.attr not in _METHODS:
            raise ExpressionError(f"the method {function.attr!r} is not allowed")
        _check(function.value, names, depth + 1)
    elif not isinstance(function, ast.Name) or function.id not in _FUNCTIONS or function.id in names:
        name = repr(function.id) if isinstance(function, ast.Name) else "what is called here"
        raise ExpressionError(f"{name} is no function; there are {', '.join(_FUNCTIONS)}")
    for argument in node.args:
        _check(argument, names, depth + 1)


def _check_comprehension(node: ast.ListComp, names: set[str], depth: int) -> None:
    loop = node.generators[0]
    if len(node.generators) != 1 or loop.is_async:
        raise ExpressionError("only one for is allowed")
    if not isinstance(loop.target, ast.Name):
        raise ExpressionError("only a single name is allowed after for")
    _check(loop.iter, names, depth + 1)
    for part in (node.elt, *loop.ifs):
        if any(isinstance(inner, ast.ListComp) for inner in ast.walk(part)):
            raise ExpressionError("a list within a list is not allowed")
        _check(part, {*names, loop.target.id}, depth + 1)


def _named(node: ast.AST) -> str:
    kinds = {ast.Attribute: "an attribute", ast.Lambda: "a lambda within", ast.NamedExpr: "an assignment"}
    return kinds.get(type(node), type(node).__name__)
