"""Graders of a task, and the check that they can grade it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from buckeye.errors import UsageError
from buckeye.mcp.config import GymConfig
from buckeye.mcp.grading.grader_parser import fill_metadata, merge_graders
from buckeye.mcp.grading.schema import Grader
from buckeye.mcp.tasks.task_schema import McpTask, StdioServer


def resolve_graders(task: McpTask, config: GymConfig) -> Sequence[Grader]:
    """Return the graders of a task with its values. Raises UsageError for a missing or invalid value."""
    graders = merge_graders(config.graders, task.graders)
    found = []
    for grader in graders:
        try:
            found.append(fill_metadata(grader, task.metadata))
        except ValueError as error:
            raise UsageError(f"task {task.id}: grade {grader.name}: {error}.") from None
    return found


def check_task_graders(tasks: Iterable[McpTask], config: GymConfig) -> None:
    """Raise UsageError for a task without graders, or with a grader that cannot grade it."""
    for task in tasks:
        graders = resolve_graders(task, config)
        if not graders and not task.evaluate_tool:
            raise UsageError(
                f"task {task.id} has neither evaluate_tool nor grade, and the configuration has no grade: "
                'nothing says what a rollout is worth. Write for example "grade": {"reply": {"exact": "42"}}.'
            )
        here = any(isinstance(server, StdioServer) for server in task.mcp_config.values())
        if folder := next((one for one in graders if one.needs_folder and not here), None):
            raise UsageError(
                f"task {task.id}: grade {folder.name} looks into the folder of the servers, and none "
                "of them is started here (command in mcp_config). Use a tool of theirs: state: {tool: ...}."
            )
