"""Read tasks from a file with one task, a list of tasks or one task per line, or from rows of a dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from buckeye.config.config_files import load_json, read_text
from buckeye.config.line_numbers import json_line_numbers
from buckeye.config.problems import Problem
from buckeye.config.settings import KeyPath, dotted
from buckeye.errors import UsageError
from buckeye.mcp.problems import collect_problems, format_value
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.mcp.workdir.initial_files import resolve_files

TASK_FILES = ("tasks.json", "tasks.jsonl", "task.json", "*_tasks.json", "*_tasks.jsonl")
"""Usual names of task files, as glob patterns."""
_JSON_COLUMNS = ("mcp_config", "setup_tool", "evaluate_tool", "grade", "metadata")
_CALLS = ("setup_tool", "evaluate_tool")


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task in a file, before its validation.

    `error` is the reason if the task is not valid JSON.
    """

    value: Any
    find_lines: Callable[[], Mapping[KeyPath, int]] = dict
    """Function that finds the lines. It takes ten times as long as reading, and only errors need it."""
    error: UsageError | None = None

    @property
    def lines(self) -> Mapping[KeyPath, int]:
        """Line number of each key path in `value`."""
        return self.find_lines()

    @property
    def name(self) -> str | None:
        """The task's id if it is a string, or None."""
        name = self.value.get("id") if isinstance(self.value, Mapping) else None
        return name if isinstance(name, str) else None


def read_tasks(path: Path) -> list[McpTask]:
    """Return the tasks of a JSON or JSON Lines file. The third task has the default id `task-0003`.

    Paths of Python graders start at the folder of the file. Raises UsageError with every problem of every
    task, each with file, line, number of the task and field.
    """
    return [
        resolve_files(task, path)
        for task in parse_tasks(read_task_rows(path), str(path), path.absolute().parent)
    ]


def find_task_line(path: Path, task_id: str) -> str | None:
    """Return file and line of a task's graders, or of the task. Return None if `path` is not a task file."""
    if not path.is_file() or path.suffix not in (".json", ".jsonl", ".ndjson"):
        return None
    for number, row in enumerate(read_task_rows(path), 1):
        if (row.name or _default_id(number)) == task_id:
            line = row.lines.get(("grade",), row.lines.get(()))
            return f"{path}:{line}" if line is not None else str(path)
    return None


def read_rows(rows: Iterable[Mapping[str, Any]], where: str) -> list[McpTask]:
    """Return the tasks of a dataset's rows. Objects and lists may be JSON texts. `where` names the dataset.

    Raises UsageError with every problem of every task.
    """
    return parse_tasks((TaskRow(row) for row in rows), where)


def parse_tasks(rows: Iterable[TaskRow], where: str, folder: Path | None = None) -> list[McpTask]:
    """Return the tasks of rows. `where` names their source in error messages.

    Paths of Python graders start at `folder`. Without a `folder`, Python graders are errors. Raises
    UsageError with every problem of every task.
    """
    tasks: list[McpTask] = []
    numbers: dict[str, int] = {}
    errors: list[UsageError] = []
    number = 0
    for number, row in enumerate(rows, 1):
        if row.error is not None:
            errors.append(row.error)
            continue
        task, problems = _parse_task(row.value, number, folder)
        name = task.id if task is not None else row.name
        if name and (first := numbers.setdefault(name, number)) != number:
            problems.append(Problem(path=("id",), message=f"task {first} also has the id {name!r}"))
        errors += [_problem_error(problem, number, row, where) for problem in problems]
        tasks += [task] if task is not None else []
    if number == 0:
        raise UsageError(f"{where} has no tasks", code="BK-ENV-TASKS", hint="add a task")
    if len(errors) > 1:
        lines = [f"{len(errors)} problems in {where}", *(f"  {error}" for error in errors)]
        raise UsageError("\n".join(lines), code="BK-ENV-TASKS")
    if errors:
        raise errors[0]
    return tasks


def _problem_error(problem: Problem, number: int, row: TaskRow, where: str) -> UsageError:
    lines = (row.lines.get(problem.path[:n]) for n in range(len(problem.path), -1, -1))
    line = next((line for line in lines if line is not None), None)
    task = f"task {number}" + (f" ({row.name})" if row.name else "")
    message = ": ".join(part for part in (task, dotted(problem.path), problem.message) if part)
    at = f"{where}:{line}" if line is not None else where
    return UsageError(message, code="BK-ENV-TASKS", at=at, hint=problem.hint)


def _parse_task(value: Any, number: int, folder: Path | None) -> tuple[McpTask | None, list[Problem]]:
    if not isinstance(value, Mapping):
        message = f"is {format_value(value)}; expected an object with prompt, mcp_config, ..."
        return None, [Problem(message=message)]
    values, problems = _decode_columns(value)
    values.setdefault("id", _default_id(number))
    try:
        task = McpTask.model_validate(values, context={"folder": folder})
    except ValidationError as error:
        more = [problem for problem in collect_problems(McpTask, values, error) if problem.path]
        known = {problem.path[:1] for problem in problems}
        return None, problems + [problem for problem in more if problem.path[:1] not in known]
    return (None if problems else task), problems


def _default_id(number: int) -> str:
    return f"task-{number:04d}"


def _decode_columns(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the row with decoded JSON texts, and its problems. An empty object as a call means no call."""
    values, problems = dict(row), []
    for column in _JSON_COLUMNS:
        if not isinstance(values.get(column), str):
            continue
        try:
            values[column] = load_json(values[column])
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            hint = 'write a call as {"name": ..., "arguments": {...}}' if column in _CALLS else None
            problems.append(Problem(path=(column,), message=f"not valid JSON: {reason}", hint=hint))
        if column in _CALLS and values[column] == {}:
            values[column] = []
    return values, problems


def read_task_rows(path: Path) -> list[TaskRow]:
    """Return the tasks of a JSON or JSON Lines file without validating them. Raises UsageError."""
    text = read_text(str(path))
    if path.suffix in (".jsonl", ".ndjson") or _is_json_lines(text):
        return list(_read_line_rows(path, text))
    value = _parse_json(path, text, 1)
    if not isinstance(value, list):
        return [TaskRow(value, lambda: json_line_numbers(text))]
    lines = cache(lambda: _lines_of_tasks(text, len(value)))
    return [TaskRow(item, partial(_lines_of_task, lines, number)) for number, item in enumerate(value)]


def _lines_of_task(lines: Callable[[], list[dict[KeyPath, int]]], number: int) -> Mapping[KeyPath, int]:
    return lines()[number]


def _lines_of_tasks(text: str, count: int) -> list[dict[KeyPath, int]]:
    """Return the line number of each key path, for each of the `count` tasks of a JSON list."""
    lines: list[dict[KeyPath, int]] = [{} for _ in range(count)]
    for key_path, line in json_line_numbers(text).items():
        if key_path:
            lines[int(key_path[0])][key_path[1:]] = line
    return lines


def _is_json_lines(text: str) -> bool:
    """Return True if the text has several non-empty lines, and the first is a complete JSON object."""
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        return len(lines) > 1 and isinstance(json.loads(lines[0]), dict)
    except (ValueError, RecursionError):
        return False


def _read_line_rows(path: Path, text: str) -> Iterator[TaskRow]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = _parse_json(path, line, number)
        except UsageError as error:
            yield TaskRow(None, error=error)
        else:
            yield TaskRow(value, partial(dict, {(): number}))


def _parse_json(path: Path, text: str, first_line: int) -> Any:
    at = f"{path}:{first_line}"
    try:
        return load_json(text)
    except json.JSONDecodeError as error:
        at = f"{path}:{first_line + error.lineno - 1}:{error.colno}"
        raise UsageError(f"not valid JSON: {error.msg}", code="BK-FILE-FORMAT", at=at) from None
    except RecursionError:
        raise UsageError("lists or objects are nested too deeply", code="BK-FILE-FORMAT", at=at) from None
    except ValueError as error:
        raise UsageError(str(error), code="BK-FILE-FORMAT", at=at) from None
