"""Sessions of one rollout: one with each server of the task, and all their tools."""

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
from buckeye.mcp.client.errors import TaskError, WorkdirFull
from buckeye.mcp.client.session import CallResult, Deadlines, Server, Session, open_session
from buckeye.mcp.gateway.starts import is_larger
from buckeye.mcp.tasks.task_schema import McpTask, StdioServer
from buckeye.mcp.tasks.variables import resolve, values_of
from buckeye.mcp.workdir.folder import Workdir
from buckeye.mcp.workdir.surroundings import started_in

_LOOK_SECONDS = 1.0


class Sessions:
    """Open sessions of a rollout. `tools` maps names to tools; a name on several servers is SERVER/NAME."""

    def __init__(self, sessions: Mapping[str, Session], workdir: Workdir | None = None) -> None:
        self._workdir = workdir
        having = Counter(tool for session in sessions.values() for tool in session.tools)
        self._owners: dict[str, tuple[Session, str]] = {}
        for session in sessions.values():
            for tool in session.tools:
                name = tool if having[tool] == 1 else f"{session.name}/{tool}"
                if name in self._owners:
                    raise TaskError(f"two tools are called {name!r}")
                self._owners[name] = session, tool
        self.tools = {name: session.tools[tool] for name, (session, tool) in self._owners.items()}

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Input schema of each tool, by name."""
        return {name: tool.input_schema for name, tool in self.tools.items()}

    async def call(self, tool: str, arguments: Mapping[str, Any], *, timeout: float) -> CallResult:
        """Call one of `tools`.

        `{workdir}` is replaced by the rollout's folder, and the folder by `{workdir}` in the result. Raises
        the faults of `Session.call`.
        """
        session, own_name = self._owners[tool]
        if self._workdir is None:
            return await session.call(own_name, arguments, timeout=timeout)
        result = await session.call(own_name, self._workdir.placed(arguments), timeout=timeout)
        hidden = self._workdir.hidden
        return replace(result, text=hidden(result.text), structured=hidden(result.structured))

    async def call_within(self, tool: str, arguments: Mapping[str, Any], seconds: float) -> CallResult:
        """Call a tool with a timeout in seconds. Raises TaskError for an unknown tool, else like `call`."""
        if tool not in self._owners:
            raise TaskError(f"no server has the tool {tool!r}; there are: {', '.join(sorted(self.tools))}")
        return await self.call(tool, arguments, timeout=seconds)


@asynccontextmanager
async def open_sessions(
    task: McpTask, deadlines: Deadlines, *, preload: bool = True, workdir: Workdir | None = None
) -> AsyncIterator[Sessions]:
    """Open sessions with all servers of a task. Servers that are commands start in `workdir`.

    Only this function resolves variables. Raises StartError, and TaskError if a variable is not set or two
    tools have one name.
    """
    async with AsyncExitStack() as stack:
        sessions = {}
        for name, server in task.mcp_config.items():
            ready, secrets = _resolved(name, server)
            if workdir is not None and isinstance(ready, StdioServer):
                ready = started_in(ready, workdir)
            sessions[name] = await stack.enter_async_context(
                open_session(name, ready, deadlines=deadlines, secrets=secrets, preload=preload)
            )
        if workdir is not None:
            watch = asyncio.create_task(_watch(workdir, list(sessions.values())))
            stack.callback(watch.cancel)
        yield Sessions(sessions, workdir)


async def _watch(workdir: Workdir, sessions: Sequence[Session]) -> None:
    """End the sessions of a rollout when its folder exceeds its size limit."""
    took = 0.0
    while True:
        # check a folder with many files less often
        await asyncio.sleep(max(_LOOK_SECONDS, 20 * took))
        started = time.monotonic()
        if await asyncio.to_thread(is_larger, workdir.place, workdir.limit):
            full = f"the rollout's folder holds more than {workdir.limit:,} bytes (defaults.workdir_bytes)"
            for session in sessions:
                session.end_with(WorkdirFull(f"server {session.name!r}: {full}"))
            return
        took = time.monotonic() - started


def _resolved(name: str, server: Server) -> tuple[Server, list[str]]:
    """Return the server with its variables replaced, and the values of these variables."""
    try:
        given, known = server.model_dump(), variables()
        return type(server).model_validate(resolve(given, known)), values_of(given, known)
    except UsageError as error:
        raise TaskError(f"server {name!r} of mcp_config: {error}") from None
    except ValueError as error:  # a variable's value is not a valid address
        raise TaskError(f"server {name!r} of mcp_config: {type(error).__name__} once resolved") from None
