"""Reads `grade` of a task or a configuration, and puts a task's own values into it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from buckeye.base.foreign_files import NotRegularError, read_regular
from buckeye.config.problems import closest, did_you_mean
from buckeye.config.settings import KeyPath
from buckeye.config.shared import CONFLICT, BaseConfig
from buckeye.config.structure import fields_of
from buckeye_mcp.grading.schema import (
    KINDS,
    OF_TASK,
    CallsGrader,
    ExpectedCall,
    Grader,
    Match,
    ReplyGrader,
    ResultGrader,
    StateGrader,
    last_number,
)


@dataclass(frozen=True, slots=True)
class GraderProblem:
    """Something wrong with `grade`: `path` are the keys below it."""

    path: KeyPath
    message: str


def read_graders(raw: Any, folder: Path | None = None) -> tuple[list[Grader], list[GraderProblem]]:
    """The graders of a `grade`, one or a list, each with a name; and all that is wrong with it. With a
    `folder`, files of functions are looked for there, and named whole."""
    if raw is None:
        return [], []
    several = isinstance(raw, list)
    graders: list[Grader] = []
    problems: list[GraderProblem] = []
    for index, one in enumerate(raw if several else [raw]):
        at: KeyPath = (index,) if several else ()
        if not isinstance(one, Mapping):
            problems.append(GraderProblem(at, f"expected a table with one of {', '.join(KINDS)}"))
            continue
        try:
            grader = Grader.model_validate(one)
            if grader.python is not None and folder is not None:
                grader = grader.model_copy(update={"python": _function(grader.python, folder)})
            graders.append(grader)
        except ValidationError as error:
            found = [_problem(one, details) for details in error.errors(include_url=False)]
            problems += [GraderProblem((*at, *path), message) for path, message in dict(found).items()]
        except OSError as error:
            problems.append(GraderProblem((*at, "python"), str(error)))
    return list(_named(graders, problems)), problems


def as_written(graders: Sequence[Grader]) -> list[dict[str, Any]]:
    """The graders as a `grade` that says the same."""
    return [grader.model_dump(mode="json", exclude_unset=True) for grader in graders]


def merged(of_all: Sequence[Grader], of_task: Sequence[Grader]) -> tuple[Grader, ...]:
    """The graders of a task: its own, after those for all tasks whose names it does not have itself."""
    own = {grader.name for grader in of_task}
    return (*(grader for grader in of_all if grader.name not in own), *of_task)


def bound(grader: Grader, metadata: Mapping[str, Any]) -> Grader:
    """The grader with the task's values for `{metadata.NAME}`. A text that is nothing else becomes the value
    itself. Raises ValueError for a value that the task lacks, or that does not fit."""
    given = grader.model_dump(exclude_unset=True)
    filled = {key: _filled(value, metadata, ()) for key, value in given.items()}
    if filled == given:
        return grader
    test = filled.get(grader.kind)
    if isinstance(test, dict) and isinstance(test.get("number"), str):
        test["number"] = last_number(test["number"])
        if test["number"] is None:
            raise ValueError(f"{grader.kind}.number: the task's value holds no number")
    try:
        return Grader.model_validate(filled)
    except ValidationError as error:
        path, message = _problem(filled, error.errors(include_url=False)[0])
        raise ValueError(f"{'.'.join(map(str, path))}: {message}") from None


def _filled(value: Any, metadata: Mapping[str, Any], path: KeyPath) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(item, metadata, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, metadata, path) for item in value]
    if not isinstance(value, str):
        return value
    if (whole := OF_TASK.fullmatch(value)) is not None:
        return _value_at(whole[1], metadata)
    as_text = re.escape if path and path[-1] == "regex" else str
    return OF_TASK.sub(lambda found: as_text(_text_of(_value_at(found[1], metadata))), value)


def _value_at(name: str, metadata: Mapping[str, Any]) -> Any:
    value: Any = metadata
    for key in name.split("."):
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            known = ", ".join(map(str, value)) if isinstance(value, Mapping) else ""
            near = did_you_mean(closest(key, map(str, value))) if isinstance(value, Mapping) else ""
            raise ValueError(f"the task's metadata has no {name} (there are: {known or 'none'}).{near}")
    return value


def _text_of(value: Any) -> str:
    if isinstance(value, Mapping | list):
        raise ValueError("a list or an object of the metadata stands alone in a text, as '{metadata.items}'")
    return str(value)


def _function(import_path: str, folder: Path) -> str:
    """The function with the whole path of its file. Raises OSError, in words, where there is none."""
    file, _, function = import_path.rpartition(":")
    path = (folder / Path(file).expanduser()).resolve()
    try:
        tree = ast.parse(read_regular(path))
    except (OSError, NotRegularError) as error:
        raise OSError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise OSError(f"{path} is no Python: {error}") from None
    known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if function not in known:
        near = did_you_mean(closest(function, known))
        raise OSError(f"{path} has no function {function}; it has: {', '.join(known) or 'none'}.{near}")
    return f"{path}:{function}"


def _named(graders: Sequence[Grader], problems: list[GraderProblem]) -> Iterator[Grader]:
    """Each with a name of its own: what it says, else its kind, with a number from the second one on."""
    taken: set[str] = set()
    for grader in graders:
        name, count = grader.name or grader.kind, 1
        if grader.name and name in taken:
            problems.append(GraderProblem((), f"two graders are called {name}"))
        while name in taken:
            count += 1
            name = f"{grader.kind}_{count}"
        taken.add(name)
        yield grader.model_copy(update={"name": name})


def _problem(values: Mapping[str, Any], error: ErrorDetails) -> tuple[KeyPath, str]:
    """Where an error is below a grader, and what it is."""
    path = tuple(part for part in error["loc"] if part != _FROM_TASK_TAG)
    owner, kind = _owner(path), error["type"]
    if kind == CONFLICT:
        fields = error["ctx"]["fields"]
        return (*path, *fields[:1]), f"{error['ctx']['message']}"
    if kind == "missing":
        return path[:-1], f"{path[-1]} is required"
    path = _written(values, path)
    if kind == "extra_forbidden":
        known = fields_of(owner)
        near = did_you_mean(closest(str(path[-1]), known)) or f" There are: {', '.join(known)}."
        return path, f"no such key.{near}"
    message = error["msg"].replace("Input should be", "expected").replace("valid dictionary", "table")
    message = _EXPECTED.get(str(path[-1]), message)
    return path, f"is {_shown(error['input'])}; {message}"


_FROM_TASK_TAG = "constrained-str"
_OR_OF_TASK = "or what each task has for it, as '{metadata.NAME}'"
_EXPECTED = {
    "name": "expected at most 60 letters, digits, dots and hyphens",
    "python": "expected a file and a function in it, as check.py:grade",
    "sha256": f"expected 64 hexadecimal digits, {_OR_OF_TASK}",
    "number": f"expected a number, {_OR_OF_TASK}",
    "set": f"expected a list, {_OR_OF_TASK}",
    "rows": f"expected a list of rows, each a list, {_OR_OF_TASK}",
}


def _written(values: Any, path: KeyPath) -> KeyPath:
    """The part of a location that is in the values: pydantic adds the kinds of a union."""
    for depth, part in enumerate(path):
        try:
            values = values[part]
        except (LookupError, TypeError):
            return path[:depth]
    return path


def _owner(path: KeyPath) -> type[BaseConfig]:
    """The class that a location is a field of."""
    owner: type[BaseConfig] = Grader
    classes: dict[str, type[BaseConfig]] = {
        "reply": ReplyGrader,
        "calls": CallsGrader,
        "result": ResultGrader,
        "state": StateGrader,
    }
    for part in path[:-1]:
        if owner is Grader:
            owner = classes.get(str(part), Grader)
        elif part == "in_order":
            owner = ExpectedCall
        elif part == "matching":
            owner = Match
    return owner


def _shown(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "a table" if isinstance(value, Mapping) else "a list"
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"
