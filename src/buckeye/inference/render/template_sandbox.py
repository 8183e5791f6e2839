"""Sandbox for third-party chat templates, with only plain data, and limits on time and length of output.

The sandbox provides the tags, filters and functions that transformers provides, except that the date is
fixed. Every loop iteration, call, filter and operator calls `_Environment.spend`, which raises an error when
the time limit has passed. So the sandbox needs no separate process or thread.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SECONDS = 2.0
"""Maximum processor time of one rendering. A conversation of 100,000 tokens takes 0.02 s."""
MAX_CHARACTERS = 2**24
"""Maximum length of the text, and of each intermediate result, that a template may produce."""
TEMPLATE_DATE = datetime(2024, 7, 26)
"""Date that templates get, which is the default of Llama's templates. The date is fixed, because prompts of a
run must not change at midnight or after a resume.
"""
DATE_STRING = TEMPLATE_DATE.strftime("%d %b %Y")
_MAX_SOURCE = 2**20
_DIGITS = re.compile(r"\d+")
_NESTED = re.compile(r"\{[^{}]*\{")
_SIZES = frozenset(
    "center ljust rjust zfill expandtabs indent wordwrap batch slice round tojson truncate".split()  # noqa: SIM905
)
"""Methods and filters with an argument that sets the length of the result, such as `center(80)`."""
_LARGE = _SIZES | {"replace", "join", "format", "format_map"}
"""Methods and filters whose result may be much longer than their input."""
_LOOP_FILTER = "buckeye-loop"  # not a name that a template can write


class TooCostlyError(SecurityError):
    """A template takes too long, or produces too much text."""


class SandboxedTemplate:
    """Compiled chat template. The constructor raises errors of jinja2 or Python if `source` is invalid."""

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_SOURCE:
            raise TooCostlyError(f"it has more than {_MAX_SOURCE} characters")
        self._environment = _Environment()
        self._template = self._environment.from_string(source)
        # The operator `~` calls these functions directly, not through the environment. So replace them.
        for name in ("str_join", "markup_join"):
            namespace = self._template.root_render_func.__globals__
            namespace[name] = functools.partial(self._environment.joined, namespace[name])

    def render(self, messages: Iterable[Mapping[str, Any]], **values: Any) -> str:
        """Return the text for messages and other values of the template.

        Raise `TooCostlyError` if the template exceeds a limit. A template may also raise any other exception.
        """
        self._environment.begin()
        given = {name: _to_plain(value) for name, value in values.items()}
        return self._template.render(messages=[_with_reasoning(_to_plain(m)) for m in messages], **given)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._bounded("tojson", _to_json)
        self.filters[_LOOP_FILTER] = self._loop_items
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": TEMPLATE_DATE.strftime,
            "dict": _make_dict,
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]
        self._current = threading.local()

    def begin(self) -> None:
        """Start the budget of a rendering in this thread."""
        self._current.budget = _Budget()

    def spend(self) -> None:
        """Raise `TooCostlyError` if the time limit has passed. Every step of a template calls this."""
        budget = getattr(self._current, "budget", None)
        if budget is not None:  # unset while the template is compiled
            budget.check()

    def joined(self, join: Callable[[Iterable[Any]], str], parts: Iterable[Any]) -> str:
        """Return `join(parts)`. Raise `TooCostlyError` if the result would be too long."""
        texts = list(parts)
        try:
            length = sum(map(len, texts))
        except TypeError:  # the operator `~` also joins numbers
            length = sum(len(text) for text in texts if isinstance(text, str))
        _check_length(length)
        return join(texts)

    def concat(self, parts: Iterable[str]) -> str:
        """Return the text of a block, a macro, or the whole template."""
        return self.joined("".join, parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`. Raise `TooCostlyError` first if the result would be too large."""
        self.spend()
        if operator == "+" and type(left) is type(right) is str:
            _check_length(len(left) + len(right))
            return left + right
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call a method or function. Raise `TooCostlyError` first if the result would be too large."""
        self.spend()
        name = getattr(function, "__name__", "")
        if name in _LARGE:
            owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
            _check_call(name, [owner, *args, *kwargs.values()])
        return super().call(context, function, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _LOOP_FILTER, [], [], None, None, lineno=loop.lineno)
        return template

    def _loop_items(self, items: Iterable[Any]) -> Iterable[Any]:
        """Return an iterable of the items of a loop that calls `spend` before each item."""
        if isinstance(items, jinja2.Undefined):
            return items  # iterating over it raises an error that names the undefined value
        return _LoopItems(items, self.spend)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        large = name in _LARGE

        @functools.wraps(function)  # also copies jinja2's marker of filters that need the environment
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.spend()
            if large:
                _check_call(name, [*args, *kwargs.values()])
            return function(*args, **kwargs)

        return bounded


class _LoopItems:
    """Items of a loop. The iterator calls `spend` before each item."""

    def __init__(self, items: Iterable[Any], spend: Callable[[], None]) -> None:
        self._items = items
        self._spend = spend

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._spend()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # jinja2 handles a TypeError of items without len


class _Budget:
    """Limit on the processor time that this thread uses for one rendering.

    The limit is not on wall time, which passes without work on a busy machine. The processor time is measured
    only when the remaining wall time is over, because measuring is slow.
    """

    def __init__(self) -> None:
        self._end = time.perf_counter() + MAX_SECONDS
        self._begun = time.thread_time()

    def check(self) -> None:
        """Raise `TooCostlyError` if this thread has used more than `MAX_SECONDS`."""
        now = time.perf_counter()
        if now < self._end:
            return
        left = MAX_SECONDS - (time.thread_time() - self._begun)
        if left <= 0:
            raise TooCostlyError(f"it takes more than {MAX_SECONDS:g} s")
        self._end = now + left


class _Generation(Extension):
    """Tag `{% generation %}` around the model's text.

    The tag is ignored, and its text is rendered.
    """

    tags = {"generation"}  # noqa: RUF012, as declared by jinja2

    def parse(self, parser: Any) -> nodes.Node:
        """Parse the block as a call of `_text`, so that the block has a separate scope of variables."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Namespace of jinja2 that rejects names with a leading underscore, which may be special in Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # no parameter is named `self`, so that a template can set an attribute `self`
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} begins with an underscore")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise `TooCostlyError` if the result of an operator would be too large."""
    if operator == "**":
        _check_length(_size(left) * _number(right))
    elif operator == "*":
        sized, count = (left, right) if _is_sized(left) else (right, left)
        _check_length(len(sized) * _number(count) if _is_sized(sized) else _size(left) + _size(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else [right])
    else:
        _check_length(_size(left) + _size(right))


def _check_call(name: str, given: list[Any]) -> None:
    """Raise `TooCostlyError` if the result of a method or filter would be too large."""
    if name in _SIZES:
        _check_length(max((_number(value) for value in given[1:]), default=0))
    elif name in ("replace", "join"):
        sizes = [len(value) for value in given if _is_sized(value)]
        _check_length(functools.reduce(int.__mul__, sizes, 1) if len(sizes) > 1 else 0, 2**36)
    elif name in ("format", "format_map") and given and isinstance(given[0], str):
        _check_format(given[0], given[1:])


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Raise `TooCostlyError` if a format string has a large width.

    A width is a number in the string. With `*` or `{:{}}` it is one of the values.
    """
    widths = [
        int(digits[-9:]) if len(digits) <= 9 else MAX_CHARACTERS + 1 for digits in _DIGITS.findall(text)
    ]
    if "*" in text or _NESTED.search(text):
        widths += [_number(value) for value in values]
    _check_length(max(widths, default=0))


def _check_length(length: int, limit: int = MAX_CHARACTERS) -> None:
    if length > limit:
        raise TooCostlyError(f"it makes a text of more than {limit} characters, or a list of as many items")


def _is_sized(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | dict)


def _size(value: Any) -> int:
    """Return the length of a text or list, or the number of bits of an integer."""
    return len(value) if _is_sized(value) else value.bit_length() if isinstance(value, int) else 0


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _with_reasoning(message: Any) -> Any:
    """Return the message with its reasoning under all names that templates read."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return (
        message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _to_plain(value: Any) -> Any:
    """Convert a value to plain JSON types, so that templates cannot call methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_to_plain(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"
