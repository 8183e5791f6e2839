"""Variables in a task: `$NAME`, `${NAME}`, `${NAME:-default}`, and `$$` for a dollar sign.

A rollout replaces variables when it opens a session. Stored and logged tasks contain only their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from buckeye.errors import UsageError

if TYPE_CHECKING:
    from buckeye.mcp.tasks.task_schema import McpTask

_VARIABLE = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<braced>[^{}]*)\}|(?P<bare>[A-Za-z_][A-Za-z0-9_]*)|(?P<open>\{))"
)
_BRACED = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)


def resolve_variables(value: Any, variables: Mapping[str, str]) -> Any:
    """Return `value` with the variables in all its strings replaced. Keys and other values stay unchanged.

    If a variable is not set, use the variable with its name in upper case: `$buckeye_API_KEY` finds
    BUCKEYE_API_KEY. Other dollar signs stay unchanged. Raises UsageError with the names of unset variables.
    """
    missing = {
        f"{name} (in {where})" if where else name: None
        for name, default, where in _find_variables(value)
        if default is None and _look_up(name, variables) is None
    }
    if missing:
        names = ", ".join(missing)
        raise UsageError(
            f"variables are not set: {names}",
            code="BK-KEY-MISSING",
            hint="set them in the environment or in .env, or write ${NAME:-default}; $$ is a dollar sign",
        )
    return map_strings(value, lambda text: _VARIABLE.sub(lambda match: _replacement(match, variables), text))


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return `value` with `change` applied to all its strings. Keys and other values stay unchanged."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(item, change) for key, item in value.items()}
    return [map_strings(item, change) for item in value] if isinstance(value, list) else value


def _find_variables(value: Any, where: str = "") -> Iterator[tuple[str, str | None, str]]:
    """Yield name, default and key path of each variable in the strings of `value`."""
    if isinstance(value, str):
        for match in _VARIABLE.finditer(value):
            name, default = _parts(match)
            if name is not None:
                yield name, default, where
    elif isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _find_variables(item, f"{where}.{key}" if where else str(key))


def _replacement(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name, default = _parts(match)
    if name is None:
        return "$"
    value = _look_up(name, variables)
    return value if value is not None else str(default)


def _parts(match: re.Match[str]) -> tuple[str | None, str | None]:
    """Return name and default of a variable, or (None, None) for `$$`.

    Raises UsageError if the braces do not contain a valid variable.
    """
    if match["dollar"] is not None:
        return None, None
    if match["bare"] is not None:
        return match["bare"], None
    inner = _BRACED.fullmatch(match["braced"]) if match["braced"] is not None else None
    if inner is None:
        raise UsageError(
            f"{match[0]!r} is not a variable",
            code="BK-ENV-TASKS",
            hint="write ${NAME} or ${NAME:-default}, and $$ for a dollar sign",
        )
    return inner["name"], inner["default"]


def _look_up(name: str, variables: Mapping[str, str]) -> str | None:
    return variables.get(name, variables.get(name.upper()))


def find_variable_values(value: Any, variables: Mapping[str, str]) -> list[str]:
    """Return the values of all set variables in `value`. These values are secret, so do not log them."""
    values = (_look_up(name, variables) for name in find_variable_names(value))
    return [text for text in values if text is not None]


def find_variable_names(value: Any) -> list[str]:
    """Return the distinct names of the variables in all strings of `value`."""
    return list(dict.fromkeys(name for name, _, _ in _find_variables(value)))


def find_server_variables(tasks: Iterable[McpTask]) -> list[str]:
    """Return the names of the variables in the tasks' servers, once per server that uses the variable."""
    servers = [server for task in tasks for server in task.mcp_config.values()]
    return [name for server in servers for name in find_variable_names(server.model_dump())]
