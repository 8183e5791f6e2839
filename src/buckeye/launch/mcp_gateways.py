"""Gateways for the MCP tasks of a run, started where none is listening."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from buckeye.base.keys import child_environment, local_key, variables
from buckeye.base.process import ChildProcess
from buckeye.base.request_gate import is_loopback
from buckeye.config.environments import EnvConfig, TrainEnvConfig
from buckeye.errors import RunError, UsageError
from buckeye.launch.plan import EnvironmentProcesses, Role
from buckeye.mcp.config import GymConfig, load_gym_config
from buckeye.mcp.environment import FORMER_ARGUMENTS, is_mcp
from buckeye.mcp.gateway.settings import API_KEY_VARIABLE, DEFAULT_SESSIONS, parse_variable_headers
from buckeye.mcp.grading.schema import needs_math
from buckeye.mcp.tasks.dataset import is_dataset
from buckeye.mcp.tasks.task_schema import HttpServer, McpTask
from buckeye.mcp.tasks.trust import read_taskset
from buckeye.mcp.tasks.variables import find_server_variables, resolve_variables

log = logging.getLogger(__name__)

DEFAULT_ROLLOUTS = 64
"""Concurrent rollouts, where no setting gives the number."""

_COMMAND = (sys.executable, "-m", "buckeye", "gateway")
_READY_SECONDS = 60.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.1
_DATASETS = ("dataset", "eval_dataset", *FORMER_ARGUMENTS)
_CONNECT_SECONDS = 2.0


@contextmanager
def task_gateway(
    environments: Iterable[EnvConfig], log_file: Path, *, rollouts: int
) -> Iterator[dict[str, str]]:
    """Have a gateway listen on the ports of this machine where the tasks of MCP environments expect one.

    A gateway started here has room for `rollouts` concurrent rollouts. Yields the variables that a process
    needs, in addition to the existing ones, to run the tasks: the key, if none is set, of the gateway started
    here or of a gateway of the user that is already listening. Raises UsageError for tasks that cannot be
    read, and for a listening gateway that expects another key.
    """
    known = variables()
    servers, words = _needs(environments, known, rollouts)
    key = _missing_key(servers, known)
    with ensure_gateway(servers, log_file, words=words, env=key) as started:
        _check_keys(servers, started, {**known, **key})
        yield key


@contextmanager
def local_gateway(environments: Iterable[EnvConfig], log_file: Path, *, rollouts: int) -> Iterator[None]:
    """Run `task_gateway` for rollouts in this process, and set its key in `os.environ` meanwhile."""
    with task_gateway(environments, log_file, rollouts=rollouts) as key:
        os.environ.update(key)
        try:
            yield
        finally:
            for name in key:
                del os.environ[name]


def plan_gateways(environments: Sequence[EnvConfig], *, rollouts: int) -> EnvironmentProcesses:
    """Return the gateways to start for a run with `rollouts` concurrent rollouts.

    There is one for every port of this machine where the tasks expect a gateway and none listens. Raises
    UsageError for tasks that cannot be read, for a listening gateway that expects another key, and for tasks
    that are placed on other nodes and name a server of this one.
    """
    known = variables()
    _refuse_placed(environments, known)
    servers, words = _needs(environments, known, rollouts)
    ports = _silent_ports(servers)
    key = _missing_key(servers, known)
    _check_keys(servers, ports, {**known, **key})
    return EnvironmentProcesses(
        roles=tuple(_gateway(index, port, words) for index, port in enumerate(ports)), env=key
    )


def _gateway(index: int, port: int, words: Sequence[str]) -> Role:
    return Role(
        kind="gateway",
        index=index,
        argv=(*_COMMAND, "--port", str(port), *words),
        port=port,
        config_name=None,
        log_name="gateway" if index == 0 else f"gateway_{index}",
    )


def _refuse_placed(environments: Iterable[EnvConfig], known: Mapping[str, str]) -> None:
    for env in environments:
        if not isinstance(env, TrainEnvConfig) or not any(env.placement or ()):
            continue
        urls = [url for task in mcp_tasks([env]) for url in _near_servers(task, known)]
        if urls:
            raise UsageError(
                f"{env.id} has placement = {env.placement}, and its tasks name {urls[0]}, which other nodes "
                "do not reach: leave placement out, or name an address that all nodes reach"
            )


def _missing_key(servers: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the gateway key that is missing, or nothing if a key is set.

    The key is the one that a gateway at one of the addresses has generated, or a new one if a gateway is to
    be started.
    """
    if known.get(API_KEY_VARIABLE):
        return {}
    addresses = list(servers)
    made = (local_key(API_KEY_VARIABLE, address) for address in addresses)
    key = next(filter(None, made), "")
    if not key and _silent_ports(addresses):
        key = secrets.token_urlsafe(24)
    return {API_KEY_VARIABLE: key} if key else {}


def _needs(
    environments: Iterable[EnvConfig], known: Mapping[str, str], rollouts: int
) -> tuple[dict[str, HttpServer], tuple[str, ...]]:
    """Return the tasks' servers on this machine by URL, and the flags of a gateway with room for all."""
    near = [_near_servers(task, known) for task in mcp_tasks(environments)]
    most = max(map(len, near), default=1)
    servers = {url: server for servers in near for url, server in servers.items()}
    words = ["--sessions", str(max(DEFAULT_SESSIONS, rollouts * most))]
    of_tasks = [server for each in near for server in each.values()]
    for name in sorted({name for server in of_tasks for name in parse_variable_headers(server.headers)}):
        words += ["--variable", name]
    return servers, tuple(words)


def _check_keys(servers: Mapping[str, HttpServer], started: Sequence[int], known: Mapping[str, str]) -> None:
    """Raise UsageError if a gateway that was already listening rejects the key of the tasks."""
    for url, server in servers.items():
        if _local_port(url) not in started:
            _check_key(url, server, known)


def mcp_tasks(environments: Iterable[EnvConfig]) -> list[McpTask]:
    """Return the tasks of the MCP environments. Raises UsageError if a task file cannot be read."""
    return _tasks_of(_named(environments, *_DATASETS))


def _tasks_of(names: Iterable[str]) -> list[McpTask]:
    return [task for name in names for tasks in read_taskset(name) for task in tasks]


def _named(environments: Iterable[EnvConfig], *arguments: str) -> list[str]:
    """Return the distinct values of these arguments of the MCP environments, sorted."""
    ours = [env for env in environments if is_mcp(env.id)]
    given = [env.args.get(name) for env in ours for name in arguments]
    return sorted({str(value) for value in given if value is not None})


def task_files(environments: Sequence[EnvConfig]) -> list[Path]:
    """Return the initial files of the rollouts, and the files of their grading functions.

    Datasets on a hub are left out: they are downloaded where the rollouts run. Raises UsageError if a task
    file or a configuration cannot be read.
    """
    datasets = [name for name in _named(environments, *_DATASETS) if Path(name).expanduser().exists()]
    written: list[GymConfig | McpTask] = [*_tasks_of(datasets)]
    written += [load_gym_config(Path(name).expanduser()) for name in _named(environments, "config_path")]
    functions = [grader.python for one in written for grader in one.graders if grader.python is not None]
    named = [one.files for one in written] + [function.rpartition(":")[0] for function in functions]
    return [Path(name) for name in dict.fromkeys(filter(None, named))]


def mcp_extras(environments: Sequence[EnvConfig]) -> set[str]:
    """Return the extras whose libraries the MCP environments import on the machine that runs them.

    Raises UsageError if a task file or a configuration cannot be read.
    """
    datasets, configs = _named(environments, *_DATASETS), _named(environments, "config_path")
    here = [name for name in datasets if Path(name).expanduser().exists()]
    written: list[GymConfig | McpTask] = [*_tasks_of(here)]
    written += [load_gym_config(Path(name).expanduser()) for name in configs]
    extras = {"mcp"} if datasets or configs else set[str]()
    if len(here) < len(datasets) or any(is_dataset(Path(name).expanduser()) for name in here):
        extras.add("hub")
    if any(needs_math(grader) for one in written for grader in one.graders):
        extras.add("math")
    return extras


def task_variables(environments: Iterable[EnvConfig]) -> list[str]:
    """Return the names of the variables that the servers of the tasks use."""
    return find_server_variables(mcp_tasks(environments))


def _near_servers(task: McpTask, known: Mapping[str, str]) -> dict[str, HttpServer]:
    """Return the HTTP servers of a task on this machine, by URL."""
    servers = [server for server in task.mcp_config.values() if isinstance(server, HttpServer)]
    found = {str(resolve_variables(server.url, known)): server for server in servers}
    return {url: server for url, server in found.items() if _local_port(url) is not None}


def _check_key(url: str, server: HttpServer, known: Mapping[str, str]) -> None:
    """Raise UsageError if the gateway that listens at `url` rejects the key of the tasks."""
    written = {name: value for name, value in server.headers.items() if name.lower() == "authorization"}
    try:
        headers = resolve_variables(written, known)
    except UsageError:
        headers = {}  # they name a variable that is not set
    try:
        answer = httpx.post(url, json={}, headers=headers, timeout=_CONNECT_SECONDS, trust_env=False)
        reason = answer.json()["error"]["data"]["reason"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return  # not a Buckeye gateway; the first task shows whether it works
    if reason == "key":
        given = "refuses that of the tasks" if headers else f"{API_KEY_VARIABLE} is not set"
        raise UsageError(
            f"The gateway that listens at {url} wants a key, and {given}. If it belongs to another run, it "
            f"ends with that run: start `buckeye gateway` by itself, with a {API_KEY_VARIABLE} that both "
            "runs have too, or give these tasks another port."
        )


@contextmanager
def ensure_gateway(
    urls: Iterable[str], log_file: Path, *, words: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[list[int]]:
    """Have a server listen on every address of this machine among `urls`.

    The URLs are those of the tasks' servers. Where none listens, start a gateway with the flags `words` and
    the variables `env` in addition to those of this process. Its output is appended to `log_file`. It ends
    with the context, or with this process. Yields the ports where a gateway was started. Raises RunError,
    with its last lines, if one does not become ready.
    """
    with ExitStack() as stack:
        started = []
        for port in _silent_ports(urls):
            stack.enter_context(_running(port, log_file, words, env or {}))
            started.append(port)
        yield started


def _silent_ports(urls: Iterable[str]) -> list[int]:
    """Return the ports of this machine among the URLs on which no server listens."""
    ports = {port for url in urls if (port := _local_port(url)) is not None}
    return [port for port in sorted(ports) if not _listens(port)]


def _local_port(url: str) -> int | None:
    """Return the port of a URL on this machine, or None for other hosts and invalid URLs."""
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not is_loopback(parts.hostname or ""):
            return None
        return parts.port or 80
    except ValueError:
        return None


def _listens(port: int) -> bool:
    for host in ("127.0.0.1", "::1"):
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError:
            continue
        return True
    return False


@contextmanager
def _running(port: int, log_file: Path, words: Sequence[str], env: Mapping[str, str]) -> Iterator[None]:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        process = ChildProcess(
            [*_COMMAND, "--port", str(port), *words],
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
        _wait_until_ready(process, port, log_file)
        log.info("Started a gateway for the tasks on port %d (log: %s)", port, log_file)
        yield
    finally:
        if not process.end(_STOP_SECONDS, session=False):
            log.warning("The gateway on port %d did not end within %g s and is killed", port, _STOP_SECONDS)


def _wait_until_ready(process: ChildProcess, port: int, log_file: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        code = process.returncode
        if _healthy(port):  # perhaps that of another run which started at the same time: it serves as well
            return
        if code is not None or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    how = f"is not ready after {_READY_SECONDS:g} s" if code is None else f"ended with exit code {code}"
    last = "\n".join(log_file.read_text(errors="replace").splitlines()[-5:])
    raise RunError(f"The gateway for the tasks' servers on port {port} {how}:\n{last}")


def _healthy(port: int) -> bool:
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=_CONNECT_SECONDS, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200
