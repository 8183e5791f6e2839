"""Open and close the folder and the MCP sessions of one rollout, and run the task's setup."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import mcp_types as types

from buckeye.config.problems import closest, suggestion
from buckeye.errors import UsageError
from buckeye.mcp.client.errors import ConfigurationError, McpEnvironmentError, SetupError, TaskError
from buckeye.mcp.client.rollout_sessions import RolloutSessions, open_sessions
from buckeye.mcp.client.session import CallResult, SessionTimeouts
from buckeye.mcp.config import GymConfig
from buckeye.mcp.grading.task_graders import resolve_graders
from buckeye.mcp.tasks.task_schema import McpTask, ToolCall, call_arguments
from buckeye.mcp.workdir.folder import Workdir, open_workdir

_LISTEN_SECONDS = 60.0  # `setup_timeout` may end the wait earlier
_MAX_CHECKED = 4  # different `mcp_config`s
_CHECK_SECONDS = 30.0  # per `mcp_config`; the servers of all start together

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResources:
    """Open sessions of a rollout, the folder of their servers, and the setup's output for the prompt."""

    sessions: RolloutSessions
    workdir: Workdir
    setup_output: str


@asynccontextmanager
async def open_rollout_resources(task: McpTask, config: GymConfig) -> AsyncIterator[RolloutResources]:
    """Open the folder and the sessions of a rollout, and run the task's setup. Close both at exit.

    Raises StartError, SetupError, or a more specific McpEnvironmentError.
    """
    limits = config.defaults
    async with (
        open_workdir(task, config) as workdir,
        open_sessions(task, _timeouts(config), preload=limits.preload, workdir=workdir) as sessions,
    ):
        _check_tools(task, config, sessions.tools)
        output = await _run_setup(task, config, sessions)
        yield RolloutResources(sessions=sessions, workdir=workdir, setup_output=output)


async def works_in_fresh_session(task: McpTask, config: GymConfig) -> bool:
    """Return True if fresh sessions start, and the task's setup succeeds in them.

    If True, the model's calls caused the fault of the current session.
    """
    try:
        async with open_rollout_resources(task, config):
            return True
    except McpEnvironmentError:
        return False


async def check_servers(tasks: Sequence[McpTask], config: GymConfig) -> None:
    """Start the servers of some tasks, and check that they have the tools that the tasks name.

    Raises UsageError if a task can never run. Log other faults, because rollouts retry them.
    """
    with_servers: dict[str, list[McpTask]] = {}
    for task in tasks:
        with_servers.setdefault(task.model_dump_json(include={"mcp_config"}), []).append(task)
    checks = [_check_set(same, config) for same in list(with_servers.values())[:_MAX_CHECKED]]
    for error in await asyncio.gather(*checks):
        if error is not None:
            raise error


async def _check_set(tasks: Sequence[McpTask], config: GymConfig) -> UsageError | None:
    """Check the tools of tasks that have the same servers. Return an error if a task can never run."""
    checked = tasks[0]
    try:
        async with (
            asyncio.timeout(_CHECK_SECONDS),
            open_workdir(checked, config) as workdir,
            open_sessions(
                checked, _timeouts(config), preload=config.defaults.preload, workdir=workdir
            ) as sessions,
        ):
            for task in tasks:
                checked = task
                _check_tools(task, config, sessions.tools)
    except TimeoutError:
        log.warning(
            "Tools of task %s not checked: its servers did not start within %g s", checked.id, _CHECK_SECONDS
        )
    except McpEnvironmentError as fault:
        if fault.final:
            message = f"task {checked.id}: {fault.message}"
            return UsageError(message, code=fault.code, at=fault.at, hint=fault.hint)
        log.warning("Tools of task %s not checked: %s", checked.id, fault)
    return None


async def run_task_call(
    key: str, call: ToolCall, sessions: RolloutSessions, timeout: float, error: type[McpEnvironmentError]
) -> CallResult:
    """Run a call that the task defines under `key`. Raises `error` if the environment fails.

    Raises TaskError if the call fails and its arguments do not match the tool's schema.
    """
    schema = sessions.tools[call.name].input_schema
    arguments = call_arguments(call, schema)
    try:
        result = await sessions.call(call.name, arguments, timeout)
    except McpEnvironmentError as fault:
        message = f"{key} {call.name}: {fault.message}"
        raise error(message, code=fault.code, at=fault.at, hint=fault.hint) from fault
    if result.is_error and (mismatch := _mismatch(arguments, schema)):
        raise TaskError(
            f"{key}: {call.name}: {mismatch}; reply of the server: {result.text[:500]}",
            code="BK-MCP-TOOL",
            hint="correct the arguments of the call in the task",
        )
    return result


def truncate_text(text: str, max_chars: int) -> tuple[str, int]:
    """Return the first `max_chars` characters plus a note about the cut, and the number of cut characters."""
    cut = max(0, len(text) - max_chars)
    return (f"{text[:max_chars]}\n(cut: {cut} more characters)" if cut else text), cut


def _timeouts(config: GymConfig) -> SessionTimeouts:
    limits = config.defaults
    return SessionTimeouts(start=limits.setup_timeout, call=limits.tool_timeout, listen=_LISTEN_SECONDS)


def _check_tools(task: McpTask, config: GymConfig, tools: Mapping[str, types.Tool]) -> None:
    """Raise ConfigurationError or TaskError for a tool that no server has, or an argument that it lacks."""
    for kind, key, tool in _named_tools(task, config):
        if tool not in tools:
            known = ", ".join(sorted(tools)) or "none"
            raise kind(
                f"{key}: no server has a tool {tool!r}",
                code="BK-MCP-TOOL",
                hint=suggestion(closest(tool, tools)) or f"use one of the tools: {known}",
            )
    for key, call in _task_calls(task, config):
        schema = tools[call.name].input_schema
        names = _closed_properties(schema)
        unknown = [name for name in call_arguments(call, schema) if names is not None and name not in names]
        if unknown:
            raise TaskError(
                f"{key}: the tool {call.name!r} has no argument {unknown[0]!r}",
                code="BK-MCP-TOOL",
                hint=suggestion(closest(unknown[0], names or ()))
                or f"use one of its arguments: {', '.join(names or ()) or 'none'}",
            )


def _named_tools(task: McpTask, config: GymConfig) -> Iterator[tuple[type[TaskError], str, str]]:
    """Yield every tool that the configuration or the task names: the error without it, the key, the tool."""
    for action in config.actions.values():
        if action.tool is not None:
            yield ConfigurationError, f"action_mappings.{action.name}", action.tool
    for key, calls in (("setup_tool", task.setup_tool), ("evaluate_tool", task.evaluate_tool)):
        for call in calls:
            yield TaskError, key, call.name
    for grader in resolve_graders(task, config):
        required = None if grader.calls is None or grader.calls.is_limit_only else grader.calls
        in_order = (grader.calls.in_order or ()) if grader.calls is not None else ()
        for test in (required, grader.result, grader.state, *in_order):
            if test is not None and test.tool is not None:
                yield TaskError, f"grade {grader.name}", test.tool


def _task_calls(task: McpTask, config: GymConfig) -> Iterator[tuple[str, ToolCall]]:
    """Yield every call that the environment makes for the task: its key, and the call."""
    for key, calls in (("setup_tool", task.setup_tool), ("evaluate_tool", task.evaluate_tool)):
        yield from ((key, call) for call in calls)
    for grader in resolve_graders(task, config):
        if grader.state is not None and grader.state.tool is not None:
            call = ToolCall(name=grader.state.tool, arguments=grader.state.arguments)
            yield f"grade {grader.name}", call


def _closed_properties(schema: Mapping[str, Any]) -> Collection[str] | None:
    """Return the arguments in a tool's schema, or None if the tool may accept others.

    Most servers leave `additionalProperties` out, and ignore an unknown argument without an error.
    """
    is_open = schema.get("additionalProperties", False) is not False
    if is_open or any(key in schema for key in ("patternProperties", "anyOf", "oneOf", "allOf", "$ref")):
        return None
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) and properties else None


def _mismatch(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return the first missing or unknown argument of a call as text, or ""."""
    missing = [name for name in schema.get("required") or () if name not in arguments]
    known = schema.get("properties") or {}
    unknown = [name for name in arguments if name not in known]
    if missing:
        return f"argument {missing[0]!r} is missing"
    if unknown and schema.get("additionalProperties") is False:
        return f"unknown argument {unknown[0]!r}"
    return ""


async def _run_setup(task: McpTask, config: GymConfig, sessions: RolloutSessions) -> str:
    """Run the setup calls, and return their joined output for the prompt. Raises SetupError."""
    outputs = []
    for call in task.setup_tool:
        seconds = config.defaults.setup_timeout
        result = await run_task_call("setup_tool", call, sessions, seconds, SetupError)
        if result.is_error:
            raise SetupError(f"setup_tool {call.name} failed: {result.text[:500]}")
        outputs.append(result.text)
    return truncate_text("\n".join(text for text in outputs if text), config.defaults.max_result_chars)[0]
