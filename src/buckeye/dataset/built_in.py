"""Built-in rewards: `exact`, `contains`, `numeric`, `math`, `regex:...`, `json:...`, `code`, `judge:...`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any
from weakref import WeakKeyDictionary

from buckeye.base.distribution import need
from buckeye.base.storage import read_json
from buckeye.config.problems import closest, suggestion
from buckeye.dataset.functions import Completion
from buckeye.dataset.judge import JudgeReward
from buckeye.dataset.prompt_tasks import Columns
from buckeye.dataset.prompts import ANSWER_COLUMNS, Prompts
from buckeye.dataset.rows import raise_problems, row_error
from buckeye.envs.base import Task
from buckeye.errors import UsageError
from buckeye.mcp.grading.grader_processes import judge_in_worker, run_script
from buckeye.mcp.grading.judge import GraderVerdict
from buckeye.mcp.grading.schema import last_number

NAMES = ("exact", "contains", "numeric", "math", "regex", "json", "code", "judge")
_TEST_COLUMNS = ("tests", "test", "test_list", "test_cases", "unit_tests")
_RUNNER = Path(__file__).with_name("code_runner.py")
_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MAX_TESTS = 100
_TEST_SECONDS = 5.0
_MAX_NUMBER = 1e300
_START_SECONDS = 10.0

Matches = Callable[[Any], Sequence[Mapping[str, Any]]]
"""Function that returns the grader tests for an answer. One passed test is enough. Raises ValueError."""


def built_in_reward(
    spec: str, columns: Columns, prompts: Prompts
) -> AnswerReward | SchemaReward | CodeReward | JudgeReward:
    """Return the built-in reward that a spec such as `exact` or `regex:^yes` names.

    Raises UsageError with every task that has no answer or no tests for the reward.
    """
    name, _, argument = spec.partition(":")
    if name == "regex":
        return AnswerReward(name, prompts.rows(), None, _match_pattern(argument))
    if name == "json":
        return SchemaReward(_read_schema(argument))
    if name == "code":
        return CodeReward(columns.others, prompts.tasks(), argument or None)
    if name == "judge":
        return JudgeReward(argument, columns)
    if name == "math":
        need("math_verify", "the reward `math`")
    matches: dict[str, Matches] = {
        "exact": _match_exact, "contains": _match_contains, "numeric": _match_number, "math": _match_math,
    }  # fmt: skip
    column = argument or columns.answer
    if column not in columns.others:
        missing = "of answers" if column is None else repr(column)
        raise UsageError(
            f"the reward `{name}` needs answers, and the dataset has no column {missing}",
            code="BK-REWARD",
            hint=suggestion(closest(column or "", columns.others, count=1))
            or f"name the column: {name}:COLUMN. Expected one of {', '.join(ANSWER_COLUMNS)}",
        )
    return AnswerReward(name, prompts.rows(), column, matches[name])


class AnswerReward:
    """Reward that tests the reply in a sandboxed process: 1 if a test passes, else 0."""

    needs_group = False

    def __init__(
        self, name: str, rows: Iterable[tuple[Mapping[str, Any], str]], column: str | None, matches: Matches
    ) -> None:
        """Raises UsageError with every row that has no usable answer."""
        self.name = name
        self._column = column
        self._matches = matches
        problems: list[UsageError] = []
        takes_any_text = matches in (_match_exact, _match_contains, _match_math)
        for row, at in rows if column is not None else ():
            answer = row.get(str(column))
            if takes_any_text and type(answer) is str and answer and not answer.isspace():
                continue
            try:
                self._tests(row)
            except ValueError as error:
                problems.append(row_error(f"{column}: {error} (reward `{name}`)", at))
        raise_problems(problems, "the dataset")

    def _tests(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if self._column is None:
            return list(self._matches(None))
        answers = self._answers(row)
        if not answers or any(value is None or not _text_of(value) for value in answers):
            raise ValueError("no answer")
        return [test for value in answers for test in self._matches(value)]

    async def score(self, task: Task, completions: Sequence[Completion]) -> list[GraderVerdict]:
        """Return 1 or 0 for each reply. Raises GraderError."""
        tests = self._tests(task.data["row"])
        return [await self._best(tests, completion.text) for completion in completions]

    def _answers(self, row: Mapping[str, Any]) -> Sequence[Any]:
        answer = row.get(str(self._column))
        return answer if isinstance(answer, list) else [answer]

    def answers_in(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return all accepted answers of a row, as the texts that have the reward 1."""
        return {} if self._column is None else {"accept": list(map(_text_of, self._answers(row)))}

    async def _best(self, tests: Sequence[Mapping[str, Any]], text: str) -> GraderVerdict:
        library = "math_verify" if self.name == "math" else None
        verdict = GraderVerdict(0.0, "")
        for test in tests:
            verdict = await judge_in_worker({"grader": {"reply": test}, "text": text}, library=library)
            if verdict.score:
                break
        return verdict


def _no_answers(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


def _text_of(answer: Any) -> str:
    return answer.strip() if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _match_exact(answer: Any) -> Sequence[Mapping[str, Any]]:
    return [{"exact": answer.strip() if isinstance(answer, str) else answer}]


def _match_contains(answer: Any) -> Sequence[Mapping[str, Any]]:
    text = _text_of(answer)
    before, after = (r"(?<!\w)" if text[:1].isalnum() else ""), (r"(?!\w)" if text[-1:].isalnum() else "")
    return [{"regex": f"(?i){before}{re.escape(text)}{after}"}]


def _match_number(answer: Any) -> Sequence[Mapping[str, Any]]:
    number = answer if isinstance(answer, int | float) else last_number(_text_of(answer))
    if number is None or isinstance(answer, bool) or not abs(number) < _MAX_NUMBER:
        raise ValueError(f"no usable number in {_text_of(answer)[:60]!r}")
    return [{"number": float(number), "tolerance": 1e-6}]


def _match_math(answer: Any) -> Sequence[Mapping[str, Any]]:
    return [{"math": _text_of(answer)}]


def _match_pattern(pattern: str) -> Matches:
    import regex

    if not pattern:
        raise UsageError(
            "`regex` has no pattern", code="BK-REWARD", hint="write regex:PATTERN, as regex:^yes"
        )
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise UsageError(f"regex:{pattern}: not a regular expression: {error}", code="BK-REWARD") from None
    return lambda _: [{"regex": pattern}]


class SchemaReward:
    """Reward for JSON: 1 if a JSON Schema accepts the reply, or its last code fence, else 0."""

    name = "json"
    needs_group = False
    answers_in = staticmethod(_no_answers)

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    async def score(self, task: Task, completions: Sequence[Completion]) -> list[GraderVerdict]:
        """Return 1 or 0 for each reply. Raises GraderError."""
        requests = [{"schema": self._schema, "text": completion.text} for completion in completions]
        return [await judge_in_worker(request, library="jsonschema") for request in requests]


def _read_schema(argument: str) -> Any:
    """Return the JSON Schema of a file; without a file, a schema that accepts every JSON value."""
    need("jsonschema", "the reward `json`")
    import jsonschema

    if not argument:
        return {}
    path = Path(os.path.expanduser(argument))
    if not path.is_file():
        hint = f"check the path; the working directory is {Path.cwd()}"
        raise UsageError(f"json:{argument}: no file {path}", code="BK-FILE-NOT-FOUND", hint=hint)
    try:
        schema = read_json(path)
        if not isinstance(schema, Mapping | bool):
            raise ValueError("expected an object")
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        reason = error.message if isinstance(error, jsonschema.SchemaError) else str(error)
        raise UsageError(f"not a JSON Schema: {reason}", code="BK-REWARD", at=str(path)) from None
    return schema


class CodeReward:
    """Reward for Python: the share of the row's tests that the code in the reply passes.

    The code runs in a sandbox without network, with limits on time and memory.
    """

    name = "code"
    needs_group = False
    answers_in = staticmethod(_no_answers)

    def __init__(self, columns: Collection[str], tasks: Iterable[Task], column: str | None) -> None:
        """Raises UsageError with every task whose tests cannot be read."""
        self._column = column or next((name for name in _TEST_COLUMNS if name in columns), None)
        if self._column is None or self._column not in columns:
            raise UsageError(
                f"the reward `code` needs tests, and the dataset has no column {column or 'of them'}",
                code="BK-REWARD",
                hint=f"name it: code:COLUMN. Expected one of {', '.join(_TEST_COLUMNS)}",
            )
        problems: list[UsageError] = []
        for task in tasks:
            try:
                self._tests(task)
            except ValueError as error:
                problems.append(row_error(f"{self._column}: {error} (reward `code`)", task.data["at"]))
        raise_problems(problems, "the dataset")
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def _tests(self, task: Task) -> list[dict[str, str]]:
        value = task.data["row"].get(str(self._column))
        if isinstance(value, str) and value.lstrip()[:1] in "[{" and value.strip():
            # Python may begin with a bracket too
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        if isinstance(value, str) and value.strip():
            value = [_with_call_of_check(value, task.data["row"].get("entry_point"))]
        tests = _tests_of(value)
        if not 0 < len(tests) <= _MAX_TESTS:
            raise ValueError(f"{len(tests)} tests; expected 1 to {_MAX_TESTS}" if tests else "no tests")
        for number, test in enumerate(tests, 1):
            if "code" in test:
                _check_syntax(test["code"], number)
        return tests

    async def score(self, task: Task, completions: Sequence[Completion]) -> list[GraderVerdict]:
        """Return the share of passed tests for each reply. Raises GraderError."""
        tests = self._tests(task)
        return [await self._run(tests, completion.text) for completion in completions]

    async def _run(self, tests: Sequence[Mapping[str, str]], text: str) -> GraderVerdict:
        request = {
            "code": find_code(text),
            "tests": tests,
            "seconds": _TEST_SECONDS,
            "key": token_hex(),
        }
        slots = asyncio.Semaphore(max(1, (os.cpu_count() or 2) // 2))
        async with self._slots.setdefault(asyncio.get_running_loop(), slots):
            reply = await run_script(_RUNNER, (), request, _START_SECONDS + 2 * _TEST_SECONDS * len(tests))
        if reply.get("key") != request["key"]:
            return GraderVerdict(0.0, "the code replaced the result of its tests")
        passed, failures = int(reply["passed"]), reply["failures"]
        shown = f"; first failure: {failures[0]}" if failures else ""
        return GraderVerdict(passed / len(tests), f"{passed} of {len(tests)} tests passed{shown}")


def find_code(reply: str) -> str:
    """Return the code of a reply: its last Python fence, else its last fence without a language, else all."""
    fences = _FENCE.findall(reply)
    for names in (("python", "py", "python3"), ("",)):
        found = [code for name, code in fences if name.lower() in names]
        if found:
            return str(found[-1])
    return reply


def _with_call_of_check(test: str, entry_point: Any) -> str:
    """Return the test with a call `check(entry_point)` if it only defines `check`, as HumanEval does."""
    if re.search(r"^def check\(", test, re.MULTILINE) is None or re.search(r"^check\(", test, re.MULTILINE):
        return test
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        raise ValueError("the test defines `check` and does not call it; add a column `entry_point`")
    return f"{test}\n\ncheck({entry_point})\n"


def _tests_of(value: Any) -> list[dict[str, str]]:
    """Return the tests of a column as a list.

    `value` is a list of Python texts, a list of mappings `{"input": ..., "output": ...}`, or one mapping
    `{"inputs": [...], "outputs": [...]}`.
    """
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= set(value):
        inputs, outputs = value["inputs"], value["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("`inputs` and `outputs` are not lists of equal length")
        value = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    tests: list[dict[str, str]] = []
    for number, test in enumerate(value if isinstance(value, list) else [], 1):
        if isinstance(test, str):
            tests.append({"code": test})
        elif _is_program_test(test):
            tests.append({"input": test.get("input", ""), "output": test["output"]})
        else:
            raise ValueError(f'test {number} is neither Python nor {{"input": "...", "output": "..."}}')
    return tests


def _is_program_test(test: Any) -> bool:
    is_text = isinstance(test, Mapping) and all(isinstance(test.get(n, ""), str) for n in ("input", "output"))
    return is_text and "output" in test


def _check_syntax(code: str, number: int) -> None:
    try:
        compile(code, f"test {number}", "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"test {number} is not Python: {error}") from None


def is_built_in(spec: str) -> bool:
    """Return True if a spec names a built-in reward, not a file or a module."""
    name = spec.partition(":")[0]
    if name not in NAMES:
        return False
    return ":" not in spec or name in ("regex", "json", "code", "math", "judge") or find_spec(name) is None
