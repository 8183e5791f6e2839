"""Combine the graders of a task and its configuration, and check that they can grade the task."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

from buckeye.config.problems import closest, suggestion
from buckeye.errors import UsageError
from buckeye.mcp.config import GymConfig
from buckeye.mcp.grading.grader_parser import fill_metadata, merge_graders
from buckeye.mcp.grading.schema import ExpectedCall, Grader
from buckeye.mcp.tasks.task_files import find_task_line
from buckeye.mcp.tasks.task_schema import McpTask, StdioServer


def resolve_graders(task: McpTask, config: GymConfig) -> Sequence[Grader]:
    """Return the graders of a task, with values of its metadata in place of `{metadata.NAME}`.

    Raises UsageError for a missing or invalid value in the metadata.
    """
    graders = merge_graders(config.grade, task.grade)
    filled = []
    for grader in graders:
        try:
            filled.append(fill_metadata(grader, task.metadata))
        except ValueError as error:
            raise _error(f"task {task.id}: grade {grader.name}: {error}") from None
    return filled


def check_task_graders(
    tasks: Iterable[McpTask], config: GymConfig, config_path: Path, datasets: Sequence[str]
) -> None:
    """Raise UsageError for a task without graders, or with a grader that can never pass.

    Such a grader needs a missing folder or value, or a call that no action of the model makes. The error
    names the place in the file of the configuration, or in the datasets, which have the tasks.
    """
    arguments = _arguments_by_tool(config)
    for task in tasks:
        graders = resolve_graders(task, config)
        for tested in graders:
            if (problem := _call_problem(tested, arguments, config)) is not None:
                is_own = any(own.name == tested.name for own in task.grade)
                places = [find_task_line(Path(os.path.expanduser(name)), task.id) for name in datasets]
                problem.at = next(filter(None, places), None) if is_own else f"{config_path} (grade)"
                raise problem.prefixed(f"task {task.id}: grade {tested.name}")
        if not graders and not task.evaluate_tool:
            hint = 'add a grader to the task or configuration, such as "grade": {"reply": {"exact": "42"}}'
            raise _error(f"task {task.id} has no grader: evaluate_tool and grade are missing", hint)
        if any(isinstance(server, StdioServer) for server in task.mcp_config.values()):
            continue
        if grader := next((grader for grader in graders if grader.needs_folder), None):
            raise _error(
                f"task {task.id}: grade {grader.name} reads the rollout's folder, but no server of the task "
                "has a `command`",
                "read the state with a tool call instead: `state: {tool: ...}`",
            )


def _arguments_by_tool(config: GymConfig) -> dict[str, Set[str]]:
    """Return the tools that the model can call, each with the arguments that its actions can set."""
    arguments: dict[str, Set[str]] = {}
    for action in config.actions.values():
        if action.tool is not None:
            arguments[action.tool] = {*arguments.get(action.tool, ()), *action.sources}
    return arguments


def _call_problem(grader: Grader, arguments: Mapping[str, Set[str]], config: GymConfig) -> UsageError | None:
    """Return the problem of a grader that tests a call which no action makes, or None."""
    for call in _graded_calls(grader):
        known = arguments.get(call.tool)
        if known is None:
            if grader.calls is not None and grader.calls.is_limit_only and not grader.calls.in_order:
                continue  # a limit also applies if the tool does not exist
            action = config.actions.get(call.tool)
            near = [action.tool] if action is not None and action.tool else closest(call.tool, arguments)
            hint = suggestion(near) or f"use one of the tools in action_mappings: {', '.join(arguments)}"
            return _error(f"no action of the model calls the tool {call.tool!r}", hint)
        for name in (*call.arguments, *call.matching):
            if name not in known:
                return _error(
                    f"no action of the model sets the argument {name!r} of the tool {call.tool!r}",
                    suggestion(closest(name, known))
                    or f"use one of the arguments: {', '.join(sorted(known)) or 'none'}",
                )
    return None


def _error(message: str, hint: str | None = None) -> UsageError:
    return UsageError(message, code="BK-GRADER", hint=hint)


def _graded_calls(grader: Grader) -> Iterator[ExpectedCall]:
    """Yield the calls of the model that a grader names."""
    if grader.calls is not None:
        yield from (call for call in (grader.calls.call, *(grader.calls.in_order or ())) if call is not None)
    if grader.result is not None and grader.result.tool is not None:
        yield ExpectedCall(tool=grader.result.tool)
