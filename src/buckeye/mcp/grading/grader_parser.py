"""Parse `grade` of a task or a configuration, and replace `{metadata.NAME}` in graders."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, ValidationError, ValidationInfo

from buckeye.base.foreign_files import NotRegularFileError, read_regular
from buckeye.config.problems import closest, did_you_mean
from buckeye.config.settings import KeyPath
from buckeye.config.shared import conflict
from buckeye.mcp.grading.schema import KINDS, METADATA_REFERENCE, Grader, last_number
from buckeye.mcp.problems import collect_problems


def as_list(value: Any) -> Any:
    """Return a value that may be a single item, or None, as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _check_table(grader: Any) -> Any:
    if not isinstance(grader, Mapping | Grader):
        raise conflict(f"expected a table with one of {', '.join(KINDS)}")
    return grader


def _resolve_python(grader: Grader, info: ValidationInfo) -> Grader:
    """Return the grader with an absolute path of its Python file, which starts at the folder of the context.

    A context without a folder is one of a dataset.
    """
    if grader.python is None or info.context is None:
        return grader
    if info.context["folder"] is None:
        hint = "move the grader to the configuration"
        raise conflict("a dataset cannot contain Python functions", "python", hint=hint)
    return grader.model_copy(update={"python": _resolve_function(grader.python, info.context["folder"])})


def _name_graders(graders: list[Grader]) -> list[Grader]:
    """Return the graders with unique names.

    The default name is the kind of the grader, such as `reply`. The second such grader is `reply_2`.
    """
    named: dict[str, Grader] = {}
    for grader in graders:
        name, count = grader.name or grader.kind, 1
        if grader.name and name in named:
            raise conflict(f"two graders have the name {name!r}")
        while name in named:
            count += 1
            name = f"{grader.kind}_{count}"
        named[name] = grader.model_copy(update={"name": name})
    return list(named.values())


def _dump_graders(graders: Sequence[Grader]) -> list[dict[str, Any]]:
    return [grader.model_dump(mode="json", exclude_unset=True) for grader in graders]


Graders = Annotated[
    list[Annotated[Grader, BeforeValidator(_check_table), AfterValidator(_resolve_python)]],
    BeforeValidator(as_list, json_schema_input_type=Grader | list[Grader] | None),
    AfterValidator(_name_graders),
    PlainSerializer(_dump_graders),
]
"""Value of `grade`: one grader or a list, with unique names.

With the key `folder` in the context of the validation, paths of Python files start at this folder, and become
absolute.
"""


def merge_graders(shared: Sequence[Grader], own: Sequence[Grader]) -> tuple[Grader, ...]:
    """Return the graders of the configuration (`shared`) and of a task (`own`).

    A grader of the task replaces the grader of the configuration with the same name.
    """
    own_names = {grader.name for grader in own}
    return (*(grader for grader in shared if grader.name not in own_names), *own)


def fill_metadata(grader: Grader, metadata: Mapping[str, Any]) -> Grader:
    """Return the grader with values of the task's metadata in place of `{metadata.NAME}`.

    If a text consists of one reference, the value keeps its type. Otherwise the value becomes part of the
    text. Raises ValueError for a missing or unsuitable value.
    """
    values = grader.model_dump(exclude_unset=True)
    filled = {key: _fill(value, metadata, ()) for key, value in values.items()}
    if filled == values:
        return grader
    test = filled.get(grader.kind)
    if isinstance(test, dict) and isinstance(test.get("number"), str):
        test["number"] = last_number(test["number"])
        if test["number"] is None:
            raise ValueError(f"{grader.kind}.number: the task's value has no number")
    try:
        return Grader.model_validate(filled)
    except ValidationError as error:
        raise ValueError(str(collect_problems(Grader, filled, error)[0])) from None


def _fill(value: Any, metadata: Mapping[str, Any], path: KeyPath) -> Any:
    if isinstance(value, Mapping):
        return {key: _fill(item, metadata, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, metadata, path) for item in value]
    if not isinstance(value, str):
        return value
    if (match := METADATA_REFERENCE.fullmatch(value)) is not None:
        return _look_up(match[1], metadata)
    escape = re.escape if path and path[-1] == "regex" else str
    return METADATA_REFERENCE.sub(lambda match: escape(_as_text(_look_up(match[1], metadata))), value)


def _look_up(name: str, metadata: Mapping[str, Any]) -> Any:
    value: Any = metadata
    for key in name.split("."):
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            keys = list(map(str, value)) if isinstance(value, Mapping) else []
            listed = f", only: {', '.join(keys)}" if keys else ""
            near = did_you_mean(closest(key, keys))
            raise ValueError(f"the task's metadata has no {name!r}{listed}{near and f'.{near}'}")
    return value


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping | list):
        raise ValueError(
            "a list or an object cannot be part of a text: write '{metadata.NAME}' without other text"
        )
    return str(value)


def _resolve_function(import_path: str, folder: Path) -> str:
    """Return `FILE:FUNCTION` with an absolute path. Raises a validation error if it names no function."""
    file, _, function = import_path.rpartition(":")
    path = (folder / Path(os.path.expanduser(file))).resolve()
    try:
        tree = ast.parse(read_regular(path))
    except (OSError, NotRegularFileError) as error:
        raise conflict(f"cannot read {path}: {getattr(error, 'strerror', error)}", "python") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise conflict(f"{path} is not valid Python: {error}", "python") from None
    known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name == function:
            message = (
                f"{path}:{node.lineno}: {function} is `async def`: write `def`, and call asyncio.run in it"
            )
            raise conflict(message, "python")
    if function not in known:
        near = did_you_mean(closest(function, known))
        message = f"{path} has no function {function}, only: {', '.join(known) or 'none'}"
        raise conflict(f"{message}{near and f'.{near}'}", "python")
    return f"{path}:{function}"
