"""Start a gateway for the MCP tasks of a run on each port where they need one and none listens."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from buckeye.base.keys import child_environment, local_key, variables
from buckeye.base.process import PYTHON, ChildProcess
from buckeye.base.request_gate import is_loopback
from buckeye.config.environments import EnvConfig, TrainEnvConfig
from buckeye.errors import RunError, UsageError
from buckeye.launch.plan import EnvironmentProcesses, Role
from buckeye.launch.processes import last_lines
from buckeye.mcp.config import GymConfig, load_gym_config
from buckeye.mcp.environment import is_mcp
from buckeye.mcp.gateway.settings import API_KEY_VARIABLE, DEFAULT_SESSIONS, parse_variable_headers
from buckeye.mcp.grading.schema import needs_math
from buckeye.mcp.tasks.dataset import find_images, is_dataset
from buckeye.mcp.tasks.task_schema import HttpServer, McpTask
from buckeye.mcp.tasks.trust import read_taskset
from buckeye.mcp.tasks.variables import find_server_variables, resolve_variables

log = logging.getLogger(__name__)

DEFAULT_ROLLOUTS = 64
"""Number of concurrent rollouts of a gateway, if no setting gives the number."""

_COMMAND = (*PYTHON, "-m", "buckeye", "gateway")
_READY_SECONDS = 60.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.1
_DATASET_ARGUMENTS = ("dataset", "eval_dataset")
_CONNECT_SECONDS = 2.0


@contextmanager
def local_gateway(environments: Sequence[EnvConfig], log_file: Path, *, rollouts: int) -> Iterator[None]:
    """Start the gateways of `plan_gateways` for rollouts in this process, and end them after the block.

    During the block, `os.environ` has the generated key. The gateways append their output to `log_file`, and
    also end when this process ends. Raises the errors of `plan_gateways`, and RunError, with the last lines
    of output, if a gateway does not become ready.
    """
    planned = plan_gateways(environments, rollouts=rollouts)
    with ExitStack() as stack:
        for role in planned.roles:
            stack.enter_context(_running_gateway(role, log_file, planned.env))
        os.environ.update(planned.env)
        for name in planned.env:
            stack.callback(os.environ.pop, name)
        yield


def plan_gateways(environments: Sequence[EnvConfig], *, rollouts: int) -> EnvironmentProcesses:
    """Return the gateways to start for a run with `rollouts` concurrent rollouts.

    The run needs one for each port of this machine that the tasks name and where no server listens. Raises
    UsageError for tasks that cannot be read, for a listening gateway that expects another key, and for tasks
    with `placement` on other nodes that name a server on this machine.
    """
    known = variables()
    _check_placement(environments, known)
    by_task = [_local_servers(task, known) for task in mcp_tasks(environments)]
    servers = {url: server for task_servers in by_task for url, server in task_servers.items()}
    ports = _unused_ports(servers)
    key = _missing_key(servers, known)
    for url, server in servers.items():
        if _local_port(url) not in ports:
            _check_key(url, server, {**known, **key})
    sessions = max(DEFAULT_SESSIONS, rollouts * max(map(len, by_task), default=1))
    all_servers = [server for task_servers in by_task for server in task_servers.values()]
    names = sorted({name for server in all_servers for name in parse_variable_headers(server.headers)})
    args = ["--sessions", str(sessions), *(word for name in names for word in ("--variable", name))]
    roles = [
        Role(kind="gateway", index=index, argv=(*_COMMAND, "--port", str(port), *args), port=port)
        for index, port in enumerate(ports)
    ]
    return EnvironmentProcesses(roles=tuple(roles), env=key)


def _check_placement(environments: Iterable[EnvConfig], known: Mapping[str, str]) -> None:
    for env in environments:
        if not isinstance(env, TrainEnvConfig) or not any(env.placement or ()):
            continue
        urls = [url for task in mcp_tasks([env]) for url in _local_servers(task, known)]
        if urls:
            raise UsageError(
                f"{env.id} has placement = {env.placement}, but its tasks use {urls[0]}, which other nodes "
                "cannot reach",
                code="BK-CONFIG-CONFLICT",
                hint="remove `placement`, or use an address in the tasks that all nodes can reach",
            )


def _missing_key(servers: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable with the gateway key, or an empty mapping if it is already set.

    The value is the key that Buckeye generated for a listening gateway, or a new key if a gateway will start.
    """
    if known.get(API_KEY_VARIABLE):
        return {}
    addresses = list(servers)
    generated = (local_key(API_KEY_VARIABLE, address) for address in addresses)
    key = next(filter(None, generated), "")
    if not key and _unused_ports(addresses):
        key = secrets.token_urlsafe(24)
    return {API_KEY_VARIABLE: key} if key else {}


def mcp_tasks(environments: Iterable[EnvConfig]) -> list[McpTask]:
    """Return the tasks of the MCP environments. Raises UsageError if a task file cannot be read."""
    return _read_tasks(dataset_names(environments))


def dataset_names(environments: Iterable[EnvConfig]) -> list[str]:
    """Return the datasets of the MCP environments: files, folders and names on the hub."""
    return _argument_values(environments, *_DATASET_ARGUMENTS)


def gateway_images(environments: Iterable[EnvConfig]) -> tuple[str, ...]:
    """Return the images that gateways on this machine start for the tasks."""
    known = variables()
    return find_images([task for task in mcp_tasks(environments) if _local_servers(task, known)])


def _read_tasks(names: Iterable[str]) -> list[McpTask]:
    return [task for name in names for tasks in read_taskset(name) for task in tasks]


def _argument_values(environments: Iterable[EnvConfig], *arguments: str) -> list[str]:
    """Return the distinct values of the named arguments of the MCP environments, sorted."""
    values = [env.args.get(name) for env in environments if is_mcp(env.id) for name in arguments]
    return sorted({str(value) for value in values if value is not None})


def task_files(environments: Sequence[EnvConfig]) -> list[Path]:
    """Return the files that the rollouts start with, and the files of their grading functions.

    Datasets on a hub are not included, because the machine that runs the rollouts downloads them. Raises
    UsageError if a task file or a configuration cannot be read.
    """
    sources = _local_sources(environments)
    functions = [grader.python for source in sources for grader in source.grade if grader.python is not None]
    files = [source.files for source in sources] + [function.rpartition(":")[0] for function in functions]
    return [Path(name) for name in dict.fromkeys(filter(None, files))]


def mcp_extras(environments: Sequence[EnvConfig]) -> set[str]:
    """Return the extras of pip that the MCP environments need on the machine that runs the rollouts.

    Raises UsageError if a task file or a configuration cannot be read.
    """
    datasets = [Path(os.path.expanduser(name)) for name in dataset_names(environments)]
    extras = {"mcp"} if datasets or _argument_values(environments, "config_path") else set[str]()
    if any(not path.exists() or is_dataset(path) for path in datasets):
        extras.add("hub")
    if any(needs_math(grader) for source in _local_sources(environments) for grader in source.grade):
        extras.add("math")
    return extras


def _local_sources(environments: Sequence[EnvConfig]) -> list[GymConfig | McpTask]:
    """Return the tasks in files of this machine, and the configurations of the MCP environments."""
    datasets = dataset_names(environments)
    configs = _argument_values(environments, "config_path")
    return [
        *_read_tasks(name for name in datasets if Path(os.path.expanduser(name)).exists()),
        *(load_gym_config(Path(os.path.expanduser(name))) for name in configs),
    ]


def task_variables(environments: Iterable[EnvConfig]) -> list[str]:
    """Return the names of the environment variables that the servers of the tasks use."""
    return find_server_variables(mcp_tasks(environments))


def _local_servers(task: McpTask, known: Mapping[str, str]) -> dict[str, HttpServer]:
    """Return the HTTP servers of a task on this machine, by URL."""
    servers = [server for server in task.mcp_config.values() if isinstance(server, HttpServer)]
    by_url = {str(resolve_variables(server.url, known)): server for server in servers}
    return {url: server for url, server in by_url.items() if _local_port(url) is not None}


def _check_key(url: str, server: HttpServer, known: Mapping[str, str]) -> None:
    """Raise UsageError if the gateway that listens at `url` rejects the key of the tasks."""
    templates = {name: value for name, value in server.headers.items() if name.lower() == "authorization"}
    try:
        headers = resolve_variables(templates, known)
    except UsageError:
        headers = {}  # the header names a variable that is not set
    try:
        reply = httpx.post(url, json={}, headers=headers, timeout=_CONNECT_SECONDS, trust_env=False)
        reason = reply.json()["error"]["data"]["reason"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return  # not a Buckeye gateway; the first task shows whether it works
    if reason == "key":
        why = "it rejects the key of the tasks" if headers else f"{API_KEY_VARIABLE} is not set"
        raise UsageError(
            f"the gateway at {url} needs a key: {why}",
            code="BK-KEY-INVALID" if headers else "BK-KEY-MISSING",
            hint=f"set {API_KEY_VARIABLE} to the key of that gateway. If the gateway belongs to another run, "
            "start a separate `buckeye gateway` for both runs, or use another port in these tasks",
        )


def _unused_ports(urls: Iterable[str]) -> list[int]:
    """Return the ports of this machine that the URLs name and on which no server listens."""
    ports = {port for url in urls if (port := _local_port(url)) is not None}
    return [port for port in sorted(ports) if not _has_listener(port)]


def _local_port(url: str) -> int | None:
    """Return the port of a URL on this machine, or None for other hosts and invalid URLs."""
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not is_loopback(parts.hostname or ""):
            return None
        return parts.port or 80
    except ValueError:
        return None


def _has_listener(port: int) -> bool:
    for host in ("127.0.0.1", "::1"):
        with suppress(OSError):
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
            return True
    return False


@contextmanager
def _running_gateway(role: Role, log_file: Path, env: Mapping[str, str]) -> Iterator[None]:
    assert role.port is not None
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        process = ChildProcess(
            role.argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **child_environment(os.environ, runs_rollouts=True),
                **env,
                "BUCKEYE_PARENT_PID": str(os.getpid()),
                "PYTHONUNBUFFERED": "1",
            },
        )
    try:
        _wait_until_ready(process, role.port, log_file)
        log.info("Started a gateway for the tasks on port %d (log: %s)", role.port, log_file)
        yield
    finally:
        if not process.end(_STOP_SECONDS, session=False):
            log.warning(
                "Killing the gateway on port %d: it did not end within %g s", role.port, _STOP_SECONDS
            )


def _wait_until_ready(process: ChildProcess, port: int, log_file: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        code = process.returncode
        if _is_healthy(port):  # or a gateway of another run that started on this port at this moment
            return
        if code is not None or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    why = f"not ready after {_READY_SECONDS:g} s" if code is None else f"it ended with exit code {code}"
    lines = "\n".join(f"  | {line}" for line in last_lines(log_file, 5))
    raise RunError(
        f"cannot start a gateway for the tasks on port {port}: {why}. Last lines of {log_file}:\n{lines}",
        code="BK-MCP-START",
    )


def _is_healthy(port: int) -> bool:
    try:
        reply = httpx.get(f"http://127.0.0.1:{port}/health", timeout=_CONNECT_SECONDS, trust_env=False)
    except httpx.HTTPError:
        return False
    return reply.status_code == 200
