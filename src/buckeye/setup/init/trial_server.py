"""Start an environment for a trial: with copies of the user's files, and with limited write access."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import mcp_types as types

from buckeye.mcp.client.session import find_executable
from buckeye.mcp.config import GymConfig
from buckeye.mcp.sandbox.confine_command import (
    apply_confine_spec,
    build_confine_spec,
    find_writable_problem,
    sandbox_support,
)
from buckeye.mcp.sandbox.runtime import SandboxLimits
from buckeye.mcp.tasks.lock_file import ToolEntry
from buckeye.mcp.tasks.task_schema import McpTask, StdioServer
from buckeye.mcp.workdir.folder import WORKDIR, create_rollout_folder, open_workdir
from buckeye.mcp.workdir.server_environment import resolve_local_paths
from buckeye.setup.init.environment_source import EnvironmentSource, Server
from buckeye.setup.init.named_paths import copy_without_keys

_CACHE_VARIABLES = {
    "UV_CACHE_DIR": "uv",
    "UV_TOOL_DIR": "uv-tools",
    "npm_config_cache": "npm",
    "PIPX_HOME": "pipx",
    "DENO_DIR": "deno",
    "BUN_INSTALL_CACHE_DIR": "bun",
}
"""Environment variables with the cache folders of programs that download servers, such as uv and npm.

Trials set each variable to a temporary folder with the given name, so that they do not fill the user's home.
"""


@functools.cache
def _scratch() -> Path:
    """Return a folder that all sessions of this process share; it is removed when the process ends."""
    return create_rollout_folder()


def with_copies(source: EnvironmentSource) -> EnvironmentSource:
    """Return the source with new copies of the folders and files that its command names.

    The notes of the source list the copies. Raises OSError.
    """
    files, notes = create_rollout_folder() if source.paths else None, list(source.notes)
    for name, path in source.paths.items():
        assert files is not None
        copy = copy_without_keys(path, files / name)
        notes.append(f"{path} is not changed: tools act on a copy ({copy})")
    if isinstance(source.task_server, StdioServer) and (reason := find_writable_problem()):
        notes.append(f"tools can write to all folders of this user: {reason}")
    return replace(source, files=files, notes=tuple(notes))


@asynccontextmanager
async def trial_task(source: EnvironmentSource) -> AsyncIterator[McpTask]:
    """Start the server of the source, and yield a task for one session. The task has no grading."""
    async with source.open_server() as server:
        others = {name: confine(other) for name, other in source.other_servers.items()}
        main = server if source.task_server is None else confine(server)
        servers = {source.name: main, **others}
        yield McpTask.model_construct(id="init", prompt="Try every tool.", mcp_config=servers)


def confine(server: Server) -> Server:
    """Return the server with a sandbox that permits writes only to the folder of the rollout and a cache."""
    if not isinstance(server, StdioServer):
        return server
    cache = _scratch() / "fetched"
    cache.mkdir(exist_ok=True)
    env = {name: str(cache / folder) for name, folder in _CACHE_VARIABLES.items()}
    env |= {"PYTHONPYCACHEPREFIX": str(cache / "python"), **server.env}
    server = resolve_local_paths(server).model_copy(update={"env": env})
    if find_writable_problem():
        return server
    limits = SandboxLimits(writable=(f"{WORKDIR}/..", str(cache)))
    spec = build_confine_spec(limits=limits, sandbox_support=sandbox_support(), cwd=Path(WORKDIR))
    argv = apply_confine_spec(spec, [find_executable(server.command), *server.args])
    return StdioServer(command=argv[0], args=list(argv[1:]), env=env)


async def timed_tools(source: EnvironmentSource, seconds: float) -> tuple[list[ToolEntry], float]:
    """Return the tools that the environment announces, and the seconds from its start to the announcement.

    `seconds` limits the start. Time to download and unpack an image does not count. Raises
    McpEnvironmentError, or an error of the runtime.
    """
    from buckeye.mcp.client.rollout_sessions import open_sessions
    from buckeye.mcp.client.session import SessionTimeouts

    config = GymConfig.model_construct(files=None if source.files is None else str(source.files))
    async with trial_task(source) as task, open_workdir(task, config) as workdir:
        started = time.monotonic()
        async with open_sessions(task, SessionTimeouts(start=seconds), workdir=workdir) as sessions:
            duration = time.monotonic() - started
            tools = [_tool_entry(name, tool) for name, tool in sessions.tools.items()]
    return tools, duration


def _tool_entry(name: str, tool: types.Tool) -> ToolEntry:
    hints = tool.annotations
    return ToolEntry(
        name=name,
        description=tool.description or "",
        input_schema=tool.input_schema,
        output_schema=tool.output_schema,
        annotations={} if hints is None else hints.model_dump(by_alias=True, exclude_none=True),
    )
