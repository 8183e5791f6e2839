"""Steps to configure an environment: find it, list its tools, generate the configuration, and try it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from buckeye.base.terminal import status_line
from buckeye.errors import BuckeyeError, UsageError
from buckeye.mcp.config import DefaultsConfig, GymConfig
from buckeye.mcp.tasks.dataset import is_dataset, read_splits
from buckeye.mcp.tasks.dataset_rows import read_with_lock
from buckeye.mcp.tasks.lock_file import EnvironmentLock, ToolEntry
from buckeye.mcp.tasks.task_schema import McpTask, StdioServer
from buckeye.mcp.workdir.folder import WORKDIR
from buckeye.setup.init.environment_source import (
    EnvironmentSource,
    find_source,
    source_of_tasks,
    with_task_servers,
)
from buckeye.setup.init.generate import GeneratedConfig, generate_config
from buckeye.setup.init.tool_choice import choose_tools, plan_actions
from buckeye.setup.init.trial import TrialResult, try_actions
from buckeye.setup.init.trial_server import timed_tools, with_copies

_FETCHERS = ("npx", "uvx", "uv", "pipx", "bunx", "pnpm", "yarn", "deno")
"""Programs that download a server before it starts: they get five times the usual timeout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedConfig:
    """A generated configuration that is not yet written, and its inputs.

    `path` is the file to write, and `files` the folder for copies of the user's files. `argv` is the command
    that generates the configuration again.
    """

    generated: GeneratedConfig
    listed: Sequence[ToolEntry]
    source: EnvironmentSource
    path: Path
    files: Path | None
    tasks: Sequence[McpTask]
    task_file: Path | None
    argv: Sequence[str]

    def command_without(self, actions: Collection[str]) -> tuple[str, ...]:
        """Return the command that leaves out these actions; () if no actions would be left."""
        planned = self.generated.plan.actions
        tools = [action.tool.name for action in planned if action.name in actions]
        if len(tools) == len(planned):
            return ()
        flags = [arg for tool in tools for arg in ("--exclude", tool)]
        return (*self.argv, *flags, "--force")


def prepare_config(
    env: str | None,
    *,
    command: str | None = None,
    headers: Mapping[str, str] | None = None,
    output: Path | None = None,
    force: bool = False,
    tasks: Path | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> PreparedConfig:
    """Start an environment and generate its configuration; write nothing.

    Raises UsageError; if the output file exists, before the environment starts.
    """
    argv = _command_line(env, command, headers or {}, output, tasks, include, exclude)
    if env is None and command is None and tasks is not None:
        task_list = read_tasks(tasks)
        source = source_of_tasks(task_list)
    else:
        source = find_source(env, command=command, headers=headers or {})
        tasks = tasks or source.tasks
        task_list = read_tasks(tasks) if tasks is not None else []
        source = with_task_servers(source, task_list)
    path = _new_path(output, source, force=force)
    files = path.with_name(f"{path.stem}-files") if source.paths else None
    if files is not None:
        _refuse_existing(files, force=force)
    source = with_copies(source)
    listed = tools_of(source)
    return PreparedConfig(
        generated=_generate(source, choose_tools(listed, include, exclude), files, task_list, include),
        listed=listed,
        source=source,
        path=path,
        files=files,
        tasks=task_list,
        task_file=tasks,
        argv=argv,
    )


def _command_line(
    env: str | None,
    command: str | None,
    headers: Mapping[str, str],
    output: Path | None,
    tasks: Path | None,
    include: Sequence[str],
    exclude: Sequence[str],
) -> tuple[str, ...]:
    """Return the command line of `rl init` with these arguments."""
    options = [("--command", command), ("--output", output), ("--dataset", tasks)]
    options += [("--header", f"{name}={value}") for name, value in headers.items()]
    options += [("--include", tool) for tool in include] + [("--exclude", tool) for tool in exclude]
    flags = [arg for flag, value in options if value is not None for arg in (flag, str(value))]
    return ("buckeye", "rl", "init", *([env] if env is not None else []), *flags)


def read_tasks(file: Path) -> list[McpTask]:
    """Return all tasks of a file or a dataset. Tasks without a server are valid."""
    if is_dataset(file):
        return [task for tasks in read_splits(file) for task in tasks]
    return read_with_lock(file, EnvironmentLock(image="any:latest"))[0]


def tools_of(source: EnvironmentSource) -> list[ToolEntry]:
    """Return the tools that an environment announces.

    Raises McpEnvironmentError, or an error of its runtime.
    """
    if source.tools is not None:
        return list(source.tools)
    program = source.task_server.command if isinstance(source.task_server, StdioServer) else ""
    seconds = DefaultsConfig().setup_timeout * (5 if Path(program).name in _FETCHERS else 1)
    with status_line(f"waiting for {source.display_name} to start and list its tools, at most {seconds:g} s"):
        return asyncio.run(timed_tools(source, seconds))[0]


def _generate(
    source: EnvironmentSource,
    tools: list[ToolEntry],
    files: Path | None,
    tasks: list[McpTask],
    requested: Sequence[str],
) -> GeneratedConfig:
    calls = [call for task in tasks for call in (*task.setup_tool, *task.evaluate_tool)]
    plan = plan_actions(
        tools,
        setup_tools={call.name for task in tasks for call in task.setup_tool},
        grading_tools={call.name for task in tasks for call in task.evaluate_tool},
        requested=requested,
        private=files is not None,
        values=_constants([call.arguments for call in calls]),
        workdir_path=f"{WORKDIR}/{next(iter(source.paths))}" if len(source.paths) == 1 else None,
    )
    server = source.task_server.model_dump(exclude_defaults=True) if source.task_server is not None else None
    folder = files.name if files is not None else None
    generated = generate_config(source.environment, plan, server=server, files=folder)
    return replace(generated, notes=(*source.notes, *generated.notes))


def _constants(arguments: Sequence[Mapping[str, Any]]) -> dict[str, str | int]:
    """Return the arguments that never differ between calls, with their values."""
    values: dict[str, set[str | int]] = {}
    for call_arguments in arguments:
        for name, value in call_arguments.items():
            if isinstance(value, str | int):
                values.setdefault(name, set()).add(value)
    return {name: next(iter(distinct)) for name, distinct in values.items() if len(distinct) == 1}


def try_config(prepared: PreparedConfig, config: GymConfig, *, try_all: bool) -> TrialResult:
    """Try the actions of the written configuration, and return the result."""
    source, task = prepared.source, next(iter(prepared.tasks), None)
    try:
        with status_line(f"trying the actions of {source.display_name}"):
            return asyncio.run(try_actions(config, prepared.listed, source, task, try_all=try_all))
    except BuckeyeError as error:
        return TrialResult((), problem=str(error))


def _new_path(output: Path | None, source: EnvironmentSource, *, force: bool) -> Path:
    name = re.sub(r"[^\w.\-]+", "-", source.environment.name).strip("-.") or "env"
    path = output or Path("configs", f"{name}.yaml")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", code="BK-FILE-EXISTS", hint="Name a file with -o")
    _refuse_existing(path, force=force)
    return path


def _refuse_existing(path: Path, *, force: bool) -> None:
    if os.path.lexists(path) and not force:
        hint = "Add --force to replace it, or name another file with -o"
        raise UsageError(f"{path} exists", code="BK-FILE-EXISTS", hint=hint)
