"""Folder and sessions of one rollout, after the task's setup."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from buckeye.mcp.client.errors import McpFault, SetupError, StartError
from buckeye.mcp.client.session import CallResult, Deadlines
from buckeye.mcp.client.sessions_of_rollout import Sessions, open_sessions
from buckeye.mcp.config import GymConfig
from buckeye.mcp.tasks.task_schema import McpTask, ToolCall, call_arguments
from buckeye.mcp.workdir.folder import Workdir, open_workdir

_LISTEN_SECONDS = 60.0  # `setup_timeout` may be shorter


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Open sessions, the folder of their servers, and the setup's output (`said`) for the prompt."""

    sessions: Sessions
    workdir: Workdir
    said: str


@asynccontextmanager
async def open_stage(task: McpTask, config: GymConfig) -> AsyncIterator[Stage]:
    """Open a stage for a task, and close it at the end of the block.

    Raises StartError, SetupError, or a more specific McpFault.
    """
    limits = config.defaults
    deadlines = Deadlines(start=limits.setup_timeout, call=limits.tool_timeout, listen=_LISTEN_SECONDS)
    async with (
        open_workdir(task, config) as workdir,
        open_sessions(task, deadlines, preload=limits.preload, workdir=workdir) as sessions,
    ):
        _check_actions(config, sessions)
        said = await _set_up(task, config, sessions)
        yield Stage(sessions=sessions, workdir=workdir, said=said)


async def untouched_fault(task: McpTask, config: GymConfig) -> McpFault | None:
    """Open a fresh stage, and return the fault if that fails; None if it works.

    None means that a fault in another session was caused by the model's calls there.
    """
    try:
        async with open_stage(task, config):
            return None
    except McpFault as fault:
        return fault


async def fixed_call(call: ToolCall, sessions: Sessions, timeout: float) -> CallResult:
    """Run a call that the task itself defines. Raises McpFault."""
    if call.name not in sessions.tools:
        known = ", ".join(sorted(sessions.tools)) or "none"
        raise StartError(f"no server has this tool; there are: {known}")
    arguments = call_arguments(call, sessions.tools[call.name].input_schema)
    return await sessions.call(call.name, arguments, timeout=timeout)


def bounded(text: str, most: int) -> tuple[str, int]:
    """Return the first `most` characters with a note about the cut, and the number of characters cut."""
    cut = max(0, len(text) - most)
    return (f"{text[:most]}\n(cut: {cut} more characters)" if cut else text), cut


def _check_actions(config: GymConfig, sessions: Sessions) -> None:
    for action in config.actions.values():
        if action.tool is not None and action.tool not in sessions.tools:
            known = ", ".join(sorted(sessions.tools)) or "none"
            raise StartError(
                f"action_mappings.{action.name}: no server has a tool {action.tool!r}; there are: {known}"
            )


async def _set_up(task: McpTask, config: GymConfig, sessions: Sessions) -> str:
    """Run the setup calls, and return their joined output for the prompt. Raises SetupError."""
    said = []
    for call in task.setup_tool:
        try:
            result = await fixed_call(call, sessions, config.defaults.setup_timeout)
        except McpFault as fault:
            raise SetupError(f"setup_tool {call.name}: {fault}") from fault
        if result.is_error:
            raise SetupError(f"setup_tool {call.name} failed: {result.text[:500]}")
        said.append(result.text)
    return bounded("\n".join(text for text in said if text), config.defaults.max_result_chars)[0]
