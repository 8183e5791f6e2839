"""Reader of tasks: a file with one task, a list or one task per line; or rows of a dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from buckeye.config.config_files import load_json
from buckeye.config.line_numbers import json_line_numbers
from buckeye.config.problems import Problem
from buckeye.config.settings import KeyPath, dotted
from buckeye.errors import UsageError
from buckeye.mcp.grading.grader_parser import dump_graders, read_graders
from buckeye.mcp.problems import collect_problems, format_value
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.mcp.workdir.initial_files import resolve_files

TASK_FILES = ("tasks.json", "tasks.jsonl", "task.json", "*_tasks.json", "*_tasks.jsonl")
"""Usual names of task files."""
_JSON_COLUMNS = ("mcp_config", "setup_tool", "evaluate_tool", "grade", "metadata")
_CALLS = ("setup_tool", "evaluate_tool")


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task as read from a file. `lines` has the line of each of its parts.

    `unreadable` is the reason why `value` is missing.
    """

    value: Any
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    unreadable: str | None = None

    @property
    def name(self) -> str | None:
        """The id, if it is a string."""
        name = self.value.get("id") if isinstance(self.value, Mapping) else None
        return name if isinstance(name, str) else None


def read_tasks(path: Path) -> list[McpTask]:
    """Return the tasks of a JSON or JSON Lines file. A task without `id` is named by its number: `task-0003`.

    Paths of grader functions are relative to the folder of the file. Raises UsageError with every problem of
    every task: file, line, number of the task, field.
    """
    return [
        resolve_files(task, path)
        for task in parse_tasks(read_task_rows(path), str(path), path.absolute().parent)
    ]


def read_rows(rows: Iterable[Mapping[str, Any]], where: str) -> list[McpTask]:
    """Return the tasks of a dataset's rows. Objects and lists in a row may be JSON texts.

    Raises UsageError with every problem of every task.
    """
    return parse_tasks((TaskRow(row) for row in rows), where)


def parse_tasks(rows: Iterable[TaskRow], where: str, folder: Path | None = None) -> list[McpTask]:
    """Return the tasks of rows. `where` is their source for messages.

    Without a `folder`, graders in Python are refused. Raises UsageError with every problem of every task.
    """
    tasks: list[McpTask] = []
    numbers: dict[str, int] = {}
    texts: list[str] = []
    number = 0
    for number, row in enumerate(rows, 1):
        if row.unreadable is not None:
            texts.append(row.unreadable)
            continue
        task, problems = _task(row.value, number, folder)
        name = task.id if task is not None else row.name
        if name and (first := numbers.setdefault(name, number)) != number:
            problems.append(Problem(path=("id",), message=f"{name!r} is the id of task {first} too"))
        texts += [_shown(problem, number, row, where) for problem in problems]
        tasks += [task] if task is not None else []
    if number == 0:
        raise UsageError(f"{where} has no tasks.")
    if len(texts) > 1:
        raise UsageError("\n".join([f"{len(texts)} problems in {where}", *(f"  {text}" for text in texts)]))
    if texts:
        raise UsageError(texts[0])
    return tasks


def _shown(problem: Problem, number: int, row: TaskRow, where: str) -> str:
    lines = (row.lines.get(problem.path[:n]) for n in range(len(problem.path), -1, -1))
    line = next((line for line in lines if line is not None), None)
    place = f"{where}:{line}" if line is not None else where
    task = f"task {number}" + (f" ({row.name})" if row.name else "")
    message = problem.message if problem.message[-1] in ".?" else f"{problem.message}."
    return ": ".join(part for part in (place, task, dotted(problem.path), message) if part)


def _task(value: Any, number: int, folder: Path | None) -> tuple[McpTask | None, list[Problem]]:
    if not isinstance(value, Mapping):
        said = f"is {format_value(value)}; expected an object with prompt, mcp_config, ..."
        return None, [Problem(message=said)]
    values, problems = _decoded(value)
    values.setdefault("id", f"task-{number:04d}")
    problems += _graded(values, folder)
    try:
        task = McpTask.model_validate(values)
    except ValidationError as error:
        found = [problem for problem in collect_problems(McpTask, values, error) if problem.path]
        told = {problem.path[:1] for problem in problems}
        return None, problems + [problem for problem in found if problem.path[:1] not in told]
    return (None if problems else task), problems


def _graded(values: dict[str, Any], folder: Path | None) -> list[Problem]:
    """Return the problems of the graders. Without problems, function paths in `values` become absolute."""
    graders, wrong = read_graders(values.get("grade"), folder)
    if graders and not wrong:
        values["grade"] = dump_graders(graders)
    problems = [replace(one, path=("grade", *one.path)) for one in wrong]
    if folder is None and any(grader.python is not None for grader in graders):
        said = "a dataset holds no functions; name it in the configuration"
        problems.append(Problem(path=("grade",), message=said))
    return problems


def _decoded(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the row with its JSON texts decoded. An empty object as a call means no call."""
    values, problems = dict(row), []
    for column in _JSON_COLUMNS:
        if not isinstance(values.get(column), str):
            continue
        try:
            values[column] = load_json(values[column])
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            call = '; a call is {"name": ..., "arguments": {...}}' if column in _CALLS else ""
            problems.append(Problem(path=(column,), message=f"its text is not valid JSON: {reason}{call}"))
        if column in _CALLS and values[column] == {}:
            values[column] = []
    return values, problems


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"there is no file {path} (this is {Path.cwd()}).") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8. Save the file as UTF-8.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} cannot be read: {reason}.") from None


def read_task_rows(path: Path) -> list[TaskRow]:
    """Return the unchecked rows of a JSON or JSON Lines file. Raises UsageError."""
    text = _text(path)
    if path.suffix in (".jsonl", ".ndjson") or _is_lines(text):
        return list(_line_rows(path, text))
    value = _parsed(path, text, 1)
    lines = json_line_numbers(text)
    if not isinstance(value, list):
        return [TaskRow(value, lines)]
    of_task: list[dict[KeyPath, int]] = [{} for _ in value]
    for place, line in lines.items():
        if place:
            of_task[int(place[0])][place[1:]] = line
    return [TaskRow(item, its_lines) for item, its_lines in zip(value, of_task, strict=True)]


def _is_lines(text: str) -> bool:
    """Return True if the first non-empty line is a complete JSON object and another line follows."""
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        return len(lines) > 1 and isinstance(json.loads(lines[0]), dict)
    except (ValueError, RecursionError):
        return False


def _line_rows(path: Path, text: str) -> Iterator[TaskRow]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = _parsed(path, line, number)
        except UsageError as error:
            yield TaskRow(None, unreadable=str(error))
        else:
            yield TaskRow(value, {(): number})


def _parsed(path: Path, text: str, first_line: int) -> Any:
    try:
        return load_json(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UsageError(f"{path}:{line}:{error.colno}: not valid JSON: {error.msg}.") from None
    except RecursionError:
        raise UsageError(f"{path}:{first_line}: its lists or objects are nested too deeply.") from None
    except ValueError as error:
        raise UsageError(f"{path}:{first_line}: {error}.") from None
