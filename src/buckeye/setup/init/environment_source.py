"""Find the environment that `buckeye rl init` configures: an image, folder, lock file, URL or command."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from buckeye.base.columns import quoted
from buckeye.base.distribution import need
from buckeye.config.config_files import read_project
from buckeye.errors import ConfigError, UsageError
from buckeye.mcp.client.http_transport import redact_url
from buckeye.mcp.gateway.settings import split_command
from buckeye.mcp.tasks.dataset_rows import is_plaintext_key
from buckeye.mcp.tasks.lock_file import (
    LOCK_FILE,
    EnvironmentLock,
    ImageName,
    ToolEntry,
    parse_image,
    read_lock,
)
from buckeye.mcp.tasks.task_schema import HttpServer, McpTask, StdioServer
from buckeye.setup.init.generate import EnvironmentName
from buckeye.setup.init.named_paths import named_paths, program_index

Server = StdioServer | HttpServer
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSource:
    """An environment to configure.

    Each call of `open_server` returns a context with a server for one session. `other_servers` are further
    servers that the tasks use. `tools` are the tools in the lock file, or None if it lacks their schemas.
    `tasks` is the task file in the folder of the environment.

    `task_server` is the server in the form of a task's `mcp_config`; None for images and folders. `paths`
    maps names in the folder of a rollout to files and folders of the user that the command names. `files` is
    a folder with copies of these paths. `uncopied_address` is a URL in the command; data there is not copied.
    `notes` are messages for the user.
    """

    environment: EnvironmentName
    open_server: Callable[[], AbstractAsyncContextManager[Server]]
    name: str = "environment"
    other_servers: Mapping[str, Server] = field(default_factory=dict)
    tools: Sequence[ToolEntry] | None = None
    tasks: Path | None = None
    display_name: str
    task_server: Server | None = None
    paths: Mapping[str, Path] = field(default_factory=dict)
    files: Path | None = None
    uncopied_address: str = ""
    notes: tuple[str, ...] = ()


def find_source(env: str | None, *, command: str | None, headers: Mapping[str, str]) -> EnvironmentSource:
    """Return the environment of `env` or `command`, without starting it.

    Raises UsageError unless exactly one of the two is given and valid.
    """
    need("mcp", "An MCP environment")
    if (env is None) == (command is None):
        raise UsageError(
            "ENV is missing" if env is None else "ENV and --command exclude each other",
            code="BK-CLI-MISSING" if env is None else "BK-CLI-CONFLICT",
            hint='Use one of `buckeye rl init ENV` and `buckeye rl init --command "..."`',
        )
    if command is not None:
        return _command_source(command)
    assert env is not None
    is_url = env.startswith(("http://", "https://"))
    if headers and not is_url:
        hint = "Use a URL, such as http://localhost:8765/mcp, or leave --header out"
        raise UsageError(f"--header: {env} is not a URL", code="BK-CLI-CONFLICT", hint=hint)
    if is_url:
        return _url_source(env, headers)
    path = Path(os.path.expanduser(env))
    if path.is_dir():
        return _folder_source(path)
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        return _lock_source(read_lock(path), path.parent)
    image = parse_image(env)
    if image is not None and (image.tag or image.digest) and not _is_path(env):
        return EnvironmentSource(
            environment=_image_environment_name(image),
            open_server=lambda: _image_server(image.tagged),
            display_name=image.tagged,
        )
    raise _unknown_environment(env, image)


def with_task_servers(source: EnvironmentSource, tasks: Sequence[McpTask]) -> EnvironmentSource:
    """Return the source with all servers of its tasks.

    If the tasks name several servers, the main server is `source.task_server`, or else the first server.
    """
    servers: dict[str, Server] = {}
    for task in tasks:
        for name, server in task.mcp_config.items():
            servers.setdefault(name, server)
    if len(servers) < 2:
        return source
    main = next(
        (name for name, server in servers.items() if _is_same_server(server, source.task_server)),
        next(iter(servers)),
    )
    return replace(
        source, name=main, other_servers={name: server for name, server in servers.items() if name != main}
    )


def _is_same_server(server: Server, other: Server | None) -> bool:
    if isinstance(server, StdioServer) and isinstance(other, StdioServer):
        return (server.command, server.args) == (other.command, other.args)
    return isinstance(server, HttpServer) and isinstance(other, HttpServer) and server.url == other.url


def source_of_tasks(tasks: Sequence[McpTask]) -> EnvironmentSource:
    """Return a source with the servers that the tasks name."""
    name, server = next(iter(tasks[0].mcp_config.items()))
    source = replace(server_source(server), environment=_environment_name(name), name=name)
    return with_task_servers(source, tasks)


def server_source(server: Server) -> EnvironmentSource:
    """Return the source for a server in the form of a task's `mcp_config`."""
    if isinstance(server, HttpServer):
        return _url_source(server.url, server.headers)
    return EnvironmentSource(
        environment=_environment_name(_command_name([server.command, *server.args])),
        open_server=lambda: nullcontext(server),
        display_name="the command",
        task_server=server,
        uncopied_address=_url_in([server.command, *server.args]),
    )


def _url_in(argv: Sequence[str]) -> str:
    """Return a URL in a program's arguments, such as postgresql://localhost/shop, or ""."""
    arguments = " ".join(argv[program_index(argv) + 1 :])
    match = re.search(r"\b(?!sqlite:|file:)[a-z][a-z0-9+.-]*://[^\s'\",]+", arguments)
    return redact_url(match[0]) if match is not None else ""


def _command_source(command: str) -> EnvironmentSource:
    argv = split_command(command)
    if not argv:
        hint = "Write the program and its arguments"
        raise UsageError("--command is empty", code="BK-CLI-MISSING", hint=hint)
    words, paths = named_paths(argv)
    rest = words[1:] if words[0] == "env" and len(words) > 1 else words
    assignments = list(takewhile(_VARIABLE.fullmatch, rest[:-1]))
    program, *arguments = rest[len(assignments) :] if assignments else words
    env = dict(assignment.split("=", 1) for assignment in assignments)
    if keys := [name for name, value in env.items() if is_plaintext_key(name, value)]:
        raise UsageError(
            f"--command has a key as text, {keys[0]}, which other users of this machine can read",
            code="BK-CLI-ARGUMENT",
            hint=f"Write a variable in single quotes: --command '{keys[0]}=$MY_KEY ...'. Its value is read "
            "from the environment or from .env",
        )
    server = escaped(StdioServer(command=program, args=arguments))
    return replace(
        server_source(server.model_copy(update={"env": env})),
        environment=_environment_name(_command_name(argv)),
        paths=paths,
    )


def _command_name(argv: Sequence[str]) -> str:
    """Return the module, package or script that a command starts."""
    program = argv[program_index(argv)]
    if program.endswith((".py", ".js", ".mjs", ".ts")):
        return Path(program).stem
    return re.sub(r"(?<=.)@.*", "", program).rpartition("/")[2]


def _url_source(url: str, headers: Mapping[str, str]) -> EnvironmentSource:
    server = HttpServer(url=url, headers=dict(headers))
    image = next((parse_image(value) for key, value in headers.items() if key.lower() == "mcp-image"), None)
    name = _image_environment_name(image) if image else _environment_name(urlsplit(url).hostname or "env")
    context = nullcontext(server)
    return EnvironmentSource(
        environment=name, open_server=lambda: context, display_name=redact_url(url), task_server=server
    )


def _folder_source(folder: Path) -> EnvironmentSource:
    lock = folder / LOCK_FILE
    if lock.exists():
        return _lock_source(read_lock(lock), folder)
    if (folder / "pyproject.toml").exists():
        return EnvironmentSource(
            environment=_environment_name(_project_name(folder)),
            open_server=lambda: _folder_server(folder),
            tasks=_task_file(folder),
            display_name=str(folder),
        )
    if (folder / "Dockerfile").exists():
        hint = f"Build its image first: `buckeye env build {quoted(folder)}`"
        raise UsageError(f"{folder} has no {LOCK_FILE}", code="BK-ENV-LOAD", hint=hint)
    raise UsageError(
        f"{folder} is not an environment: no pyproject.toml, Dockerfile or {LOCK_FILE}",
        code="BK-ENV-LOAD",
        hint="Name the folder of an environment; `buckeye env new NAME` creates one",
    )


def default_image_name(folder: Path) -> ImageName:
    """Return the default image name of a folder: the name of its project, with the tag latest."""
    name = re.sub(r"[^a-z0-9]+", "-", _project_name(folder).lower()).strip("-") or "env"
    return ImageName(name, "latest")


def _lock_source(lock: EnvironmentLock, folder: Path) -> EnvironmentSource:
    """Return the source for a lock file: the folder's own server if it has one, else the image."""
    image = lock.image_name
    has_schemas = lock.tools is not None and all(tool.input_schema is not None for tool in lock.tools)
    is_project = (folder / "pyproject.toml").exists()
    return EnvironmentSource(
        environment=_image_environment_name(image),
        open_server=lambda: _folder_server(folder) if is_project else _image_server(image.tagged),
        tools=lock.tools if has_schemas else None,
        tasks=_task_file(folder),
        display_name=str(folder) if is_project else image.tagged,
    )


def _task_file(folder: Path) -> Path | None:
    path = folder / "tasks.json"
    return path if path.is_file() else None


def _project_name(folder: Path) -> str:
    try:
        name = read_project(folder / "pyproject.toml").get("project", {}).get("name")
    except ConfigError:
        name = None
    return name if isinstance(name, str) and name else folder.resolve().name


def _environment_name(name: str) -> EnvironmentName:
    return EnvironmentName(name=name, image=name)


def _image_environment_name(image: ImageName) -> EnvironmentName:
    return EnvironmentName(name=image.short, image=image.tagged)


def _is_path(env: str) -> bool:
    return env.startswith((".", "/", "~")) or env.endswith(("/", ".yaml", ".yml"))


def _unknown_environment(env: str, image: ImageName | None) -> UsageError:
    hint = 'For an image, write my-env:latest; for a program, --command "..."'
    if shutil.which(env) is not None:
        hint = f'For a program, --command "{env}"'
    elif image is not None and not _is_path(env):
        hint = f'For an image, add its tag: {env}:latest; for a program, --command "{env}"'
    message = f"{env}: not a folder in {Path.cwd()}, and not an image name with a tag"
    return UsageError(message, code="BK-ENV-UNKNOWN", hint=hint)


@asynccontextmanager
async def _image_server(image: str) -> AsyncIterator[Server]:
    from buckeye.mcp.sandbox.container_runtimes import image_runtime
    from buckeye.mcp.sandbox.runtime import SandboxLimits

    async with _launch(lambda folder: image_runtime("auto", SandboxLimits(), folder), image) as server:
        yield server


@asynccontextmanager
async def _folder_server(folder: Path) -> AsyncIterator[Server]:
    from buckeye.mcp.sandbox.confine_command import find_writable_problem
    from buckeye.mcp.sandbox.process_runtimes import FolderRuntime
    from buckeye.mcp.sandbox.runtime import SandboxLimits

    def make(process_folder: Path) -> FolderRuntime:
        writable = None if find_writable_problem() else (str(process_folder),)
        return FolderRuntime(folder, SandboxLimits(writable=writable))

    async with _launch(make, "") as server:
        yield server


@asynccontextmanager
async def _launch(make: Callable[[Path], Any], image: str) -> AsyncIterator[Server]:
    """Yield the command line that starts a session in a runtime; clean up after the session."""
    from buckeye.mcp.gateway.process_folder import open_process_folder
    from buckeye.mcp.gateway.running_environment import clean_up
    from buckeye.mcp.sandbox.confine_command import start_command
    from buckeye.mcp.sandbox.runtime import cache_folder

    with open_process_folder(cache_folder() / "gateway") as process_folder:
        runtime = make(process_folder)
        await runtime.prepare(image)
        session_folder = Path(tempfile.mkdtemp(dir=process_folder))
        launch = await runtime.launch(image, session_folder, {})
        (command, *args), env = start_command(launch.program)
        try:
            yield escaped(StdioServer(command=command, args=args, env=dict(env)))
        finally:
            await clean_up(launch, session_folder)


def escaped(server: StdioServer) -> StdioServer:
    """Return the server with `$` written as `$$`, because tasks replace variables such as `$NAME`."""
    return StdioServer(
        command=server.command.replace("$", "$$"),
        args=[arg.replace("$", "$$") for arg in server.args],
        env={name: value.replace("$", "$$") for name, value in server.env.items()},
    )
