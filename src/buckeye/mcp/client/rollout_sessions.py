"""Sessions of one rollout: one session per server of the task, and the tools of all servers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from buckeye.base.keys import variables
from buckeye.errors import UsageError
from buckeye.mcp.client.errors import TaskError, WorkdirFullError
from buckeye.mcp.client.session import CallResult, McpSession, Server, SessionTimeouts, open_session
from buckeye.mcp.gateway.running_environment import is_larger
from buckeye.mcp.tasks.task_schema import McpTask, StdioServer
from buckeye.mcp.tasks.variables import find_variable_values, resolve_variables
from buckeye.mcp.workdir.folder import Workdir
from buckeye.mcp.workdir.server_environment import adapt_to_workdir

_CHECK_SECONDS = 1.0


class RolloutSessions:
    """Open sessions of a rollout. If several servers have a tool NAME, its key in `tools` is SERVER/NAME."""

    def __init__(self, sessions: Mapping[str, McpSession], workdir: Workdir) -> None:
        self._workdir = workdir
        counts = Counter(tool for session in sessions.values() for tool in session.tools)
        self._owners: dict[str, tuple[McpSession, str]] = {}
        for session in sessions.values():
            for tool in session.tools:
                name = tool if counts[tool] == 1 else f"{session.name}/{tool}"
                if name in self._owners:
                    raise TaskError(
                        f"two tools have the name {name!r}",
                        code="BK-MCP-TOOL",
                        hint="rename a server in `mcp_config`",
                    )
                self._owners[name] = session, tool
        self.tools = {name: session.tools[tool] for name, (session, tool) in self._owners.items()}

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Input schema of each tool, by the tool's key in `tools`."""
        return {name: tool.input_schema for name, tool in self.tools.items()}

    async def call(self, tool: str, arguments: Mapping[str, Any], timeout: float) -> CallResult:
        """Call one of `tools`, with a timeout in seconds.

        In the arguments, `{workdir}` becomes the path of the rollout's folder. In the result, the path
        becomes `{workdir}`. Raises the faults of `McpSession.call`.
        """
        session, own_name = self._owners[tool]
        result = await session.call(own_name, self._workdir.expand_workdir(arguments), timeout=timeout)
        mask = self._workdir.mask_workdir
        return replace(result, text=mask(result.text), structured=mask(result.structured))


@asynccontextmanager
async def open_sessions(
    task: McpTask, timeouts: SessionTimeouts, *, workdir: Workdir, preload: bool = True
) -> AsyncIterator[RolloutSessions]:
    """Open sessions with all servers of a task. Servers with a `command` start in `workdir`.

    Replace variables in `mcp_config` by their values. Raises StartError if a server does not start, and
    TaskError if a variable is not set or if two tools have the same name.
    """
    async with AsyncExitStack() as stack:
        sessions = {}
        for name, server in task.mcp_config.items():
            resolved, secrets = _resolve_server(name, server)
            if isinstance(resolved, StdioServer):
                resolved = adapt_to_workdir(resolved, workdir)
            sessions[name] = await stack.enter_async_context(
                open_session(name, resolved, timeouts=timeouts, secrets=secrets, preload=preload)
            )
        watcher = asyncio.create_task(_watch_size(workdir, list(sessions.values())))
        stack.callback(watcher.cancel)
        yield RolloutSessions(sessions, workdir)


async def _watch_size(workdir: Workdir, sessions: Sequence[McpSession]) -> None:
    """Abort the sessions of a rollout when its folder exceeds the size limit."""
    took = 0.0
    while True:
        # check a folder with many files less often
        await asyncio.sleep(max(_CHECK_SECONDS, 20 * took))
        started = time.monotonic()
        if await asyncio.to_thread(is_larger, workdir.root, workdir.limit):
            reason = f"the rollout's folder is larger than {workdir.limit:,} bytes (`defaults.workdir_bytes`)"
            for session in sessions:
                session.abort(WorkdirFullError(f"server {session.name!r}: {reason}"))
            return
        took = time.monotonic() - started


def _resolve_server(name: str, server: Server) -> tuple[Server, list[str]]:
    """Return the server with the values of its variables, and a list of these values."""
    fields, known, at = server.model_dump(), variables(), f"server {name!r} of `mcp_config`"
    try:
        resolved = type(server).model_validate(resolve_variables(fields, known))
    except UsageError as error:
        raise TaskError(error.message, code=error.code, at=at, hint=error.hint) from None
    except ValueError:  # hide the message, because it contains the values of the variables
        raise TaskError("the values of its variables give an invalid URL or field", at=at) from None
    return resolved, find_variable_values(fields, known)
