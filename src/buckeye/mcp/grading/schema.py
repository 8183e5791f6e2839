"""Schema of the graders in `grade` of a task or a configuration."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from buckeye.config.shared import BaseConfig, conflict
from buckeye.mcp.grading.read_only_sql import query_problem

NonEmpty = Annotated[str, Field(min_length=1)]
METADATA_REFERENCE = re.compile(r"\{metadata\.([^{}]+)\}")
"""Reference to a value of the task's metadata, such as `{metadata.answer}`, in a longer text."""
FromTask = Annotated[str, Field(pattern=r"^\{metadata\.[^{}]+\}$")]
"""Text that consists of one reference to the task's metadata, such as `{metadata.answer}`."""
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?",
    re.ASCII,
)
KINDS = ("reply", "calls", "result", "state", "python")
"""Kinds of graders. A grader sets exactly one of these fields."""
_TESTS = ("exact", "contains", "regex", "number", "set", "math")


class Match(BaseConfig):
    """Test of a text, or of the value at `json_path` in this text."""

    json_path: NonEmpty | None = None
    """Path (RFC 9535) to the tested value in a JSON text.

    If the path finds several values, the test reads the list of these values. Without a test, the path must
    find at least one value.
    """
    exact: Any = None
    """Expected text, without white space around it. A value that is not a text is compared as JSON."""
    ignore_case: bool = False
    """Ignore case in `exact` and `contains`."""
    contains: NonEmpty | None = None
    """Text that must occur in the tested text."""
    regex: NonEmpty | None = None
    """Regular expression that must match a part of the tested text."""
    number: Annotated[float, Field(strict=True)] | FromTask | None = None
    """Expected value of the last number in the tested text."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-9
    """Maximum absolute difference from `number`."""
    set: list[Any] | FromTask | None = None
    """Expected items in any order, and no others. The tested text is a JSON list, or items on lines or
    between commas.
    """
    math: NonEmpty | None = None
    """Expected value in LaTeX or plain text. Mathematical equality counts: 1/2, 0.5 and \\frac{1}{2} pass."""

    @model_validator(mode="after")
    def _check_test(self) -> Self:
        tests = self.tests
        if len(tests) > 1:
            raise conflict(f"has {' and '.join(tests)}; keep one, or write a grader for each", *tests)
        if self.regex is not None and not METADATA_REFERENCE.search(self.regex):
            import regex  # only installed with an extra, so do not import it with this module

            try:
                regex.compile(self.regex)
            except regex.error as error:
                raise conflict(f"not a valid regular expression: {error}", "regex") from None
        if self.json_path is not None:
            _check_json_path(self.json_path)
        if self.math is not None:
            _check_math()
        return self

    @property
    def tests(self) -> tuple[str, ...]:
        """Names of the tests that this object sets. A valid object sets at most one."""
        return tuple(name for name in _TESTS if name in self.model_fields_set)


def _must_test(match: Match) -> Match:
    if not match.tests and match.json_path is None:
        raise conflict(f"has no test; add one of {', '.join((*_TESTS, 'json_path'))}")
    return match


class ReplyGrader(Match):
    """Test of the model's last reply, without its thoughts and calls."""

    _check = model_validator(mode="after")(_must_test)


class ExpectedCall(BaseConfig):
    """Call that the model must have made without an error."""

    tool: NonEmpty
    """Name of the MCP tool."""
    arguments: dict[str, Any] = {}
    """Expected values of arguments. The call may have further arguments."""
    matching: dict[str, Match] = {}
    """Tests of arguments, by the name of the argument."""


class CallsGrader(BaseConfig):
    """Test of the calls that the model made."""

    tool: NonEmpty | None = None
    """MCP tool of the counted calls. None: count the calls of all tools (only with `at_most`)."""
    arguments: dict[str, Any] = {}
    """Expected values of arguments in a counted call. The call may have further arguments."""
    matching: dict[str, Match] = {}
    """Tests of arguments in a counted call, by the name of the argument."""
    at_least: PositiveInt | None = None
    """Minimum number of counted calls without an error. Default: 1, or 0 if `at_most` is set."""
    at_most: NonNegativeInt | None = None
    """Maximum number of counted calls, including calls with an error."""
    in_order: Annotated[list[ExpectedCall], Field(min_length=1)] | None = None
    """Calls that the model must make in this order. Other calls may occur between them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool is None and self.in_order is None and self.at_most is None:
            raise conflict("names no calls; add tool, in_order or at_most")
        if self.tool is None and (self.arguments or self.matching or self.at_least):
            raise conflict("required with arguments, matching and at_least", "tool")
        if self.in_order is not None and self.tool is not None:
            raise conflict("has tool and in_order; write a grader for each", "tool", "in_order")
        return self

    @property
    def is_limit_only(self) -> bool:
        """True if the grader only limits the number of calls, so that the tool need not exist."""
        return self.at_most is not None and self.at_least is None

    @property
    def call(self) -> ExpectedCall | None:
        """Description of the calls that the grader counts. None if it counts all calls."""
        if self.tool is None:
            return None
        return ExpectedCall(tool=self.tool, arguments=self.arguments, matching=self.matching)


class ResultGrader(Match):
    """Test of the result of the model's last call: its structured content if any, or its text."""

    tool: NonEmpty | None = None
    """MCP tool whose results are tested. Default: all tools."""
    any: bool = False
    """Test the results of all calls. One of them must pass."""

    _check = model_validator(mode="after")(_must_test)


class StateGrader(Match):
    """Test of the state after the rollout: a file, a database, a tool's result, or a program."""

    file: NonEmpty | None = None
    """Path of a file in the rollout's folder. The test reads its text. Without a test, it must exist."""
    exists: bool = True
    """If false, the file must not exist."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$|^\{metadata\.[^{}]+\}$")] | None = None
    """Expected SHA-256 hash of the file's content, in hexadecimal."""
    database: NonEmpty | None = None
    """Path of a SQLite file in the rollout's folder."""
    query: NonEmpty | None = None
    """Read-only query on `database`. A test reads its rows, or its value if it has only one."""
    parameters: list[Any] = []
    """Values for the question marks of the query."""
    rows: list[list[Any]] | FromTask | None = None
    """Expected rows of the query, in order."""
    tool: NonEmpty | None = None
    """MCP tool that Buckeye calls after the last turn. The test reads its result."""
    arguments: dict[str, Any] = {}
    """Arguments of the call of `tool`."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program and arguments to run in the rollout's folder. A test reads the program's output."""
    exit_code: int = 0
    """Expected exit code of the program."""

    _FIELD_KINDS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("exists", "sha256"), "file"),
        **dict.fromkeys(("query", "parameters", "rows"), "database"),
        "arguments": "tool",
        "exit_code": "command",
    }

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = [name for name in ("file", "database", "tool", "command") if getattr(self, name) is not None]
        for name in kinds[:1]:
            path = PurePosixPath(str(getattr(self, name)))
            if name in ("file", "database") and (path.is_absolute() or ".." in path.parts):
                raise conflict("must be a path inside the rollout's folder, such as notes/todo.txt", name)
        if len(kinds) != 1:
            message = f"has {' and '.join(kinds)}; keep" if kinds else "needs"
            raise conflict(f"{message} one of file, database, tool and command", *kinds)
        for name, kind in self._FIELD_KINDS.items():
            if name in self.model_fields_set and kind != kinds[0]:
                raise conflict(f"applies to {kind} only, not to {kinds[0]}", name)
        if self.database is not None:
            if self.query is None or (self.rows is None and not self.tests and self.json_path is None):
                raise conflict("needs a query, and its expected rows or a test", "database")
            if METADATA_REFERENCE.search(self.query):
                raise conflict(
                    "must not contain {metadata.NAME}; write ?, and add the value to parameters", "query"
                )
            if (problem := query_problem(self.query)) is not None:
                raise conflict(f"not a read-only query: {problem}", "query")
        if self.tool is not None:
            _must_test(self)
        if not self.exists and (self.tests or self.json_path or self.sha256):
            raise conflict("false, so the content of the file cannot be tested", "exists")
        return self


class Grader(BaseConfig):
    """One grader, with exactly one of `reply`, `calls`, `result`, `state` and `python`."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,60}$")] = ""
    """Name of the grader in metrics, as `grade/NAME`. Default: the kind, such as `reply`."""
    weight: PositiveFloat = 1.0
    """Weight of the grader's score, relative to the other graders."""
    reply: ReplyGrader | None = None
    """Test of the model's last reply."""
    calls: CallsGrader | None = None
    """Test of the calls that the model made."""
    result: ResultGrader | None = None
    """Test of a call's result."""
    state: StateGrader | None = None
    """Test of the state after the rollout."""
    python: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")] | None = None
    """Python file and function, such as check.py:grade. The function runs in a separate process."""
    timeout: PositiveFloat = 60.0
    """Timeout in seconds for a command, a function or a tool."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            message = f"has {' and '.join(kinds)}; keep" if kinds else "needs"
            raise conflict(f"{message} one of {', '.join(KINDS)}", *kinds)
        return self

    @property
    def kind(self) -> str:
        """The one field of `KINDS` that the grader sets."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def needs_folder(self) -> bool:
        """True if the grader reads the rollout's folder."""
        return self.state is not None and self.state.tool is None


def last_number(text: str) -> float | None:
    """Return the last number in a text, or None. Numbers may have commas between thousands."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return float(last[0][0].replace(",", "").replace("\u2212", "-")) if last else None


def _check_json_path(path: str) -> None:
    import jsonpath

    try:
        jsonpath.compile(path)
    except Exception as error:  # jsonpath raises several classes
        raise conflict(f"not a valid JSON path: {str(error).splitlines()[0]}", "json_path") from None


def needs_math(grader: Grader) -> bool:
    """Return True if a grader tests mathematical equality. The test needs the extra `math`."""
    match = grader.reply or grader.result or grader.state
    return match is not None and match.math is not None


def _check_math() -> None:
    from importlib.util import find_spec

    if find_spec("math_verify") is None:
        raise conflict("needs a library that is not installed: pip install 'buckeye-rl[math]'", "math")
