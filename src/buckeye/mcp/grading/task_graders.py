"""Combine the graders of a task and its configuration, and check that they can grade the task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from buckeye.errors import UsageError
from buckeye.mcp.config import GymConfig
from buckeye.mcp.grading.grader_parser import fill_metadata, merge_graders
from buckeye.mcp.grading.schema import Grader
from buckeye.mcp.tasks.task_schema import McpTask, StdioServer


def resolve_graders(task: McpTask, config: GymConfig) -> Sequence[Grader]:
    """Return the graders of a task, with values of its metadata in place of `{metadata.NAME}`.

    Raises UsageError for a missing or invalid value in the metadata.
    """
    graders = merge_graders(config.graders, task.graders)
    filled = []
    for grader in graders:
        try:
            filled.append(fill_metadata(grader, task.metadata))
        except ValueError as error:
            raise UsageError(f"task {task.id}: grade {grader.name}: {error}", code="BK-GRADER") from None
    return filled


def check_task_graders(tasks: Iterable[McpTask], config: GymConfig) -> None:
    """Raise UsageError for a task without graders, or with a grader that needs a missing folder or value."""
    for task in tasks:
        graders = resolve_graders(task, config)
        if not graders and not task.evaluate_tool:
            raise UsageError(
                f"task {task.id} has no grader: evaluate_tool and grade are missing",
                code="BK-GRADER",
                hint='add a grader to the task or configuration, such as "grade": {"reply": {"exact": "42"}}',
            )
        if any(isinstance(server, StdioServer) for server in task.mcp_config.values()):
            continue
        if grader := next((grader for grader in graders if grader.needs_folder), None):
            raise UsageError(
                f"task {task.id}: grade {grader.name} reads the rollout's folder, but no server of the task "
                "has a `command`",
                code="BK-GRADER",
                hint="read the state with a tool call instead: `state: {tool: ...}`",
            )
