"""The environment of `buckeye rl init ENV`: an image, a folder, a lock file, an address or a command."""

from __future__ import annotations

import re
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from buckeye.base.distribution import need
from buckeye.errors import UsageError
from buckeye.mcp.client.http_transport import redact_url
from buckeye.mcp.gateway.settings import split_command
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

    `open_server` yields a server of it for one session, each time it is entered. `other_servers` are the other servers
    of its tasks. `tools` are those of a lock file, if it has them with their schemas. `tasks` is a task file
    in the same folder.

    `task_server` is the server as tasks name it, if they can. `paths` are the user's paths in its command, by
    their name in a rollout's folder, and `files` is a folder with copies of them. `uncopied_address` is an address in
    its command, whose data is not copied. `notes` are for the user.
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
    """Return the environment without starting it. Raises UsageError unless exactly one is named."""
    need("mcp", "An MCP environment")
    if (env is None) == (command is None):
        raise UsageError('say which environment: `buckeye rl init ENV` or `buckeye rl init --command "..."`')
    if command is not None:
        return _of_command(command)
    assert env is not None
    address = env.startswith(("http://", "https://"))
    if headers and not address:
        raise UsageError("--header is for an address, as http://localhost:8765/mcp")
    if address:
        return _of_address(env, headers)
    path = Path(env).expanduser()
    if path.is_dir():
        return _of_folder(path)
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        return _locked(read_lock(path), path.parent)
    image = parse_image(env)
    if image is not None and (image.tag or image.digest) and not _is_path(env):
        return _of_image(image)
    raise UsageError(_nothing(env, image))


def with_task_servers(source: EnvironmentSource, tasks: Sequence[McpTask]) -> EnvironmentSource:
    """Return the source with all servers of its tasks.

    If the tasks name several servers, the main one is the server that equals `source.task_server`, or else the
    first.
    """
    servers: dict[str, Server] = {}
    for task in tasks:
        for name, server in task.mcp_config.items():
            servers.setdefault(name, server)
    if len(servers) < 2:
        return source
    own = next((name for name, one in servers.items() if _same(one, source.task_server)), next(iter(servers)))
    return replace(
        source, name=own, other_servers={name: server for name, server in servers.items() if name != own}
    )


def _same(one: Server, other: Server | None) -> bool:
    if isinstance(one, StdioServer) and isinstance(other, StdioServer):
        return (one.command, one.args) == (other.command, other.args)
    return isinstance(one, HttpServer) and isinstance(other, HttpServer) and one.url == other.url


def source_of_tasks(tasks: Sequence[McpTask]) -> EnvironmentSource:
    """Return the environment of the tasks: the servers that they name."""
    name, server = next(iter(tasks[0].mcp_config.items()))
    return with_task_servers(replace(of_server(server), environment=_named(name), name=name), tasks)


def of_server(server: Server) -> EnvironmentSource:
    """Return the source for a server as tasks name it."""
    if isinstance(server, HttpServer):
        return _of_address(server.url, server.headers)
    return EnvironmentSource(
        environment=_named(_name_of_command([server.command, *server.args])),
        open_server=lambda: nullcontext(server),
        display_name="the command",
        task_server=server,
        uncopied_address=_address_in([server.command, *server.args]),
    )


def _address_in(words: Sequence[str]) -> str:
    """Return a URL in a program's arguments, such as postgresql://localhost/shop, or ""."""
    given = " ".join(words[program_index(words) + 1 :])
    found = re.search(r"\b(?!sqlite:|file:)[a-z][a-z0-9+.-]*://[^\s'\",]+", given)
    return redact_url(found[0]) if found is not None else ""


def _of_command(command: str) -> EnvironmentSource:
    words = split_command(command)
    if not words:
        raise UsageError("--command is empty: write the program and its arguments")
    named = named_paths(words)
    rest = named.words[1:] if named.words[0] == "env" and len(named.words) > 1 else named.words
    given = list(takewhile(_VARIABLE.fullmatch, rest[:-1]))
    program, *arguments = rest[len(given) :] if given else named.words
    env = dict(word.split("=", 1) for word in given)
    server = escaped(StdioServer(command=program, args=arguments, env=env))
    return replace(of_server(server), environment=_named(_name_of_command(words)), paths=named.paths)


def _name_of_command(words: Sequence[str]) -> str:
    """Return the module, package or script that a command starts."""
    word = words[program_index(words)]
    if word.endswith((".py", ".js", ".mjs", ".ts")):
        return Path(word).stem
    return re.sub(r"(?<=.)@.*", "", word).rpartition("/")[2]


def _of_address(url: str, headers: Mapping[str, str]) -> EnvironmentSource:
    server = HttpServer(url=url, headers=dict(headers))
    image = next((parse_image(value) for key, value in headers.items() if key.lower() == "mcp-image"), None)
    called = _of_image_name(image) if image is not None else _named(urlsplit(url).hostname or "env")
    given = nullcontext(server)
    return EnvironmentSource(
        environment=called, open_server=lambda: given, display_name=redact_url(url), task_server=server
    )


def _of_image(image: ImageName) -> EnvironmentSource:
    shown = image.tagged
    return EnvironmentSource(
        environment=_of_image_name(image), open_server=lambda: _image_server(shown), display_name=shown
    )


def _of_folder(folder: Path) -> EnvironmentSource:
    lock = folder / LOCK_FILE
    if lock.exists():
        return _locked(read_lock(lock), folder)
    if (folder / "pyproject.toml").exists():
        return EnvironmentSource(
            environment=_named(_project_name(folder)),
            open_server=lambda: _folder_server(folder),
            tasks=_tasks(folder),
            display_name=str(folder),
        )
    if (folder / "Dockerfile").exists():
        raise UsageError(f"{folder} has no {LOCK_FILE}. Build its image first: buckeye env build {folder}")
    raise UsageError(
        f"{folder} is no environment: it has no pyproject.toml, no Dockerfile and no {LOCK_FILE}."
    )


def default_image_name(folder: Path) -> ImageName:
    """Return the default image name of a folder: the name of its project, with the tag latest."""
    name = re.sub(r"[^a-z0-9]+", "-", _project_name(folder).lower()).strip("-") or "env"
    return ImageName(name, "latest")


def _locked(lock: EnvironmentLock, folder: Path) -> EnvironmentSource:
    """Return the source for a lock file: the folder's own server if it has one, else the image."""
    image = lock.image_name
    known = lock.tools is not None and all(tool.input_schema is not None for tool in lock.tools)
    project = (folder / "pyproject.toml").exists()
    return EnvironmentSource(
        environment=_of_image_name(image),
        open_server=(lambda: _folder_server(folder)) if project else (lambda: _image_server(image.tagged)),
        tools=lock.tools if known else None,
        tasks=_tasks(folder),
        display_name=str(folder) if project else image.tagged,
    )


def _tasks(folder: Path) -> Path | None:
    path = folder / "tasks.json"
    return path if path.is_file() else None


def _project_name(folder: Path) -> str:
    try:
        name = tomllib.loads((folder / "pyproject.toml").read_text("utf-8")).get("project", {}).get("name")
    except (OSError, ValueError):
        name = None
    return name if isinstance(name, str) and name else folder.resolve().name


def _named(name: str) -> EnvironmentName:
    return EnvironmentName(name=name, image=name)


def _of_image_name(image: ImageName) -> EnvironmentName:
    return EnvironmentName(name=image.short, image=image.tagged)


def _is_path(env: str) -> bool:
    return env.startswith((".", "/", "~")) or env.endswith(("/", ".yaml", ".yml"))


def _nothing(env: str, image: ImageName | None) -> str:
    hint = ' An image is written as my-env:latest, a program as --command "...".'
    if image is not None and not _is_path(env):
        hint = f" For an image, write its tag: {env}:latest."
    return f"{env} is neither a folder (this is {Path.cwd()}) nor the name of an image with a tag.{hint}"


@asynccontextmanager
async def _image_server(image: str) -> AsyncIterator[Server]:
    from buckeye.mcp.sandbox.container_runtimes import image_runtime
    from buckeye.mcp.sandbox.runtime import SandboxLimits

    async with _launched(lambda own: image_runtime("auto", SandboxLimits(), own), image) as server:
        yield server


@asynccontextmanager
async def _folder_server(folder: Path) -> AsyncIterator[Server]:
    from buckeye.mcp.sandbox.confine_command import find_writable_problem
    from buckeye.mcp.sandbox.process_runtimes import FolderRuntime
    from buckeye.mcp.sandbox.runtime import SandboxLimits

    def runtime(own: Path) -> FolderRuntime:
        return FolderRuntime(folder, SandboxLimits(writable=None if find_writable_problem() else (str(own),)))

    async with _launched(runtime, "") as server:
        yield server


@asynccontextmanager
async def _launched(make: Callable[[Path], Any], image: str) -> AsyncIterator[Server]:
    """Yield the command line that starts a session in a runtime; clean up after the session."""
    from buckeye.mcp.gateway.process_folder import open_process_folder
    from buckeye.mcp.gateway.running_environment import clean_up
    from buckeye.mcp.sandbox.runtime import FolderFactory, cache_folder

    with open_process_folder(cache_folder() / "gateway") as own:
        runtime = make(own)
        await runtime.prepare(image)
        place = FolderFactory(own).create()
        launch = await runtime.launch(image, place, {})
        program, *words = launch.argv
        try:
            yield escaped(StdioServer(command=program, args=words, env=dict(launch.env)))
        finally:
            await clean_up(launch, place)


def escaped(server: StdioServer) -> StdioServer:
    """Return the server with escaped dollar signs, so that none of them is read as a task's variable."""
    return StdioServer(
        command=server.command.replace("$", "$$"),
        args=[word.replace("$", "$$") for word in server.args],
        env={name: value.replace("$", "$$") for name, value in server.env.items()},
    )
