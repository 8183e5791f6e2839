"""What a grader is, as `grade` of a task or a configuration says it; and one with a task's own values."""

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
OF_TASK = re.compile(r"\{metadata\.([^{}]+)\}")
"""What stands for a value of the task."""
FromTask = Annotated[str, Field(pattern=r"^\{metadata\.[^{}]+\}$")]
"""A value that every task has for itself, as `{metadata.answer}`."""
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?",
    re.ASCII,
)
_TESTS = ("exact", "contains", "regex", "number", "set", "math")


class Match(BaseConfig):
    """What a text, or the value in it, has to be: one test, after `json_path` if that is set."""

    json_path: NonEmpty | None = None
    """The text is JSON, and the test is about what this path (RFC 9535) leads to: a value, or a list if they
    are several. Without a test something has to be there."""
    exact: Any = None
    """It is this, but for white space around it; anything but a text is compared as JSON."""
    ignore_case: bool = False
    """Whether capitals and small letters are the same to `exact` and `contains`."""
    contains: NonEmpty | None = None
    """This is a part of it."""
    regex: NonEmpty | None = None
    """This pattern is found in it."""
    number: Annotated[float, Field(strict=True)] | FromTask | None = None
    """Its last number is this one."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-9
    """How far the number may be off."""
    set: list[Any] | FromTask | None = None
    """It has these items and no others, in any order: a JSON list, or texts by commas or lines."""
    math: NonEmpty | None = None
    """It is mathematically equal to this, in LaTeX or plain: 1/2, 0.5 and \\frac{1}{2} are."""

    @model_validator(mode="after")
    def _check_test(self) -> Self:
        tests = self.tests
        if len(tests) > 1:
            raise conflict(f"it has {' and '.join(tests)}; keep one, or write a grader for each", *tests)
        if self.regex is not None and not OF_TASK.search(self.regex):
            import regex  # of an extra; settings are read without it

            try:
                regex.compile(self.regex)
            except regex.error as error:
                raise conflict(f"is no regular expression: {error}", "regex") from None
        if self.json_path is not None:
            _check_json_path(self.json_path)
        if self.math is not None:
            _check_math()
        return self

    @property
    def tests(self) -> tuple[str, ...]:
        """The names of its tests: one, or none."""
        return tuple(name for name in _TESTS if name in self.model_fields_set)


def _must_test(match: Match) -> Match:
    if not match.tests and match.json_path is None:
        raise conflict(f"say what it has to be, with one of {', '.join((*_TESTS, 'json_path'))}")
    return match


class ReplyGrader(Match):
    """The model's last reply, without its thoughts and calls."""

    _check = model_validator(mode="after")(_must_test)


class ExpectedCall(BaseConfig):
    """A call that has to be among those of the model that gave no error."""

    tool: NonEmpty
    """The MCP tool."""
    arguments: dict[str, Any] = {}
    """Arguments that it had, each exactly so; it may have had others."""
    matching: dict[str, Match] = {}
    """Arguments that pass a test."""


class CallsGrader(BaseConfig):
    """Which tools the model called."""

    tool: NonEmpty | None = None
    """The MCP tool that it called; with `at_most` alone, which calls are counted (by default all)."""
    arguments: dict[str, Any] = {}
    """Arguments that the call had, each exactly so; it may have had others."""
    matching: dict[str, Match] = {}
    """Arguments that pass a test."""
    at_least: PositiveInt | None = None
    """So many such calls that gave no error; 1 unless `at_most` is set."""
    at_most: NonNegativeInt | None = None
    """No more than so many such calls, those that gave an error included."""
    in_order: Annotated[list[ExpectedCall], Field(min_length=1)] | None = None
    """These calls, one after the other; there may be others between them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool is None and self.in_order is None and self.at_most is None:
            raise conflict("say which tool has to be called, with tool, in_order or at_most")
        if self.tool is None and (self.arguments or self.matching or self.at_least):
            raise conflict("say which tool is meant", "tool")
        if self.in_order is not None and self.tool is not None:
            raise conflict("it has tool and in_order; write a grader for each", "tool", "in_order")
        return self

    @property
    def call(self) -> ExpectedCall | None:
        """The call that is counted; None for any."""
        if self.tool is None:
            return None
        return ExpectedCall(tool=self.tool, arguments=self.arguments, matching=self.matching)


class ResultGrader(Match):
    """What a call of the model gave: the last one's result, its structured content if that has any."""

    tool: NonEmpty | None = None
    """The MCP tool whose calls are looked at; by default all."""
    any: bool = False
    """Whether it is enough that one of the results passes."""

    _check = model_validator(mode="after")(_must_test)


class StateGrader(Match):
    """What the rollout left behind: a file, a database, what a tool says of it, or a program."""

    file: NonEmpty | None = None
    """A file in the rollout's folder, whose text is tested; without a test it has to be there."""
    exists: bool = True
    """false: the file must not be there."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$|^\{metadata\.[^{}]+\}$")] | None = None
    """The hash of the file's content."""
    database: NonEmpty | None = None
    """An SQLite file in the rollout's folder, which is only read."""
    query: NonEmpty | None = None
    """The statement that is asked."""
    parameters: list[Any] = []
    """Values for its question marks."""
    rows: list[list[Any]] | FromTask | None = None
    """The rows that it has to give, in this order."""
    tool: NonEmpty | None = None
    """An MCP tool, which is called when the model has finished; its result is tested."""
    arguments: dict[str, Any] = {}
    """The arguments of that call."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """A program and its arguments, run in the rollout's folder; what it prints is tested."""
    exit_code: int = 0
    """What the program has to end with."""

    _BELONGS: ClassVar[Mapping[str, str]] = {
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
                raise conflict("names a path in the rollout's folder, as notes/todo.txt", name)
        if len(kinds) != 1:
            said = "it has " + " and ".join(kinds) if kinds else "say what is looked at"
            raise conflict(f"{said}: one of file, database, tool and command", *kinds)
        for name, kind in self._BELONGS.items():
            if name in self.model_fields_set and kind != kinds[0]:
                raise conflict(f"belongs to {kind}, and this is about {kinds[0]}", name)
        if self.database is not None:
            if self.query is None or (self.rows is None and not self.tests and self.json_path is None):
                raise conflict("it needs a query, and the rows that it has to give", "database")
            if OF_TASK.search(self.query):
                raise conflict("takes no values of a task; write ? and put them into parameters", "query")
            if (problem := query_problem(self.query)) is not None:
                raise conflict(f"is no query that only reads: {problem}", "query")
        if self.tool is not None:
            _must_test(self)
        if not self.exists and (self.tests or self.json_path or self.sha256):
            raise conflict("a file that must not be there has no content to test", "exists")
        return self


class Grader(BaseConfig):
    """One grader. It has exactly one of `reply`, `calls`, `result`, `state` and `python`."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,60}$")] = ""
    """What it is called in components, as `grade/NAME`; by default its kind."""
    weight: PositiveFloat = 1.0
    """What it counts beside the others."""
    reply: ReplyGrader | None = None
    """The model's last reply."""
    calls: CallsGrader | None = None
    """Which tools it called."""
    result: ResultGrader | None = None
    """What a call gave."""
    state: StateGrader | None = None
    """What the rollout left behind."""
    python: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")] | None = None
    """A function of your own, as check.py:grade, in a process of its own."""
    timeout: PositiveFloat = 60.0
    """Seconds that a command, a function or a tool may take."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            said = f"it has {' and '.join(kinds)}" if kinds else "say what is graded"
            raise conflict(f"{said}: one of {', '.join(KINDS)}", *kinds)
        return self

    @property
    def kind(self) -> str:
        """The one of `KINDS` that it has."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def needs_folder(self) -> bool:
        """Whether it looks at the rollout's folder."""
        return self.state is not None and self.state.tool is None


KINDS = ("reply", "calls", "result", "state", "python")


def last_number(text: str) -> float | None:
    """The last number in a text, which may have commas between thousands."""
    found = deque(_NUMBER.finditer(text), maxlen=1)
    return float(found[0][0].replace(",", "").replace("\u2212", "-")) if found else None


def _check_json_path(path: str) -> None:
    import jsonpath

    try:
        jsonpath.compile(path)
    except Exception as error:  # of several classes
        raise conflict(f"is no JSON path: {str(error).splitlines()[0]}", "json_path") from None


def needs_math(grader: Grader) -> bool:
    """Return True if a grader compares mathematically, with a library of the extra `math`."""
    match = grader.reply or grader.result or grader.state
    return match is not None and match.math is not None


def _check_math() -> None:
    from importlib.util import find_spec

    if find_spec("math_verify") is None:
        raise conflict("needs a library that is not installed: pip install 'buckeye-rl[math]'", "math")
