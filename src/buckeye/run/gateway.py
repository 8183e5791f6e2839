"""The gateway that a run's tasks need, started if nobody has."""

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

from buckeye.config.orchestrator import EnvConfig
from buckeye.envs.gateway.address import is_loopback
from buckeye.envs.mcp.environment import NAME
from buckeye.envs.registry import EnvironmentId
from buckeye.errors import RunError
from buckeye.tasks.dotenv import variables
from buckeye.tasks.files import read_tasks
from buckeye.tasks.models import HttpServer
from buckeye.tasks.variables import resolve

log = logging.getLogger(__name__)

_READY_SECONDS = 60.0
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 2.0


_KEY = "BUCKEYE_API_KEY"


@contextmanager
def task_gateway(environments: Iterable[EnvConfig], log_file: Path) -> Iterator[dict[str, str]]:
    """Have a gateway listen where the tasks of MCP environments expect one on this machine.

    Yields the variables that whoever plays the tasks needs beside those there are: a key of its own, if a
    gateway was started and there is none. Raises UsageError for tasks that cannot be read.
    """
    key = {} if _KEY in variables() else {_KEY: secrets.token_urlsafe(24)}
    with ensure_gateway(_task_urls(environments), log_file, env=key) as started:
        yield key if started else {}


def _task_urls(environments: Iterable[EnvConfig]) -> set[str]:
    """The addresses of the servers that tasks of MCP environments act on."""
    files = {
        Path(str(env.args[name])).expanduser()
        for env in environments
        if not env.id.startswith((".", "/", "~")) and EnvironmentId.parse(env.id).name == NAME
        for name in ("taskset", "eval_taskset")
        if env.args.get(name) is not None
    }
    tasks = (task for file in files for task in read_tasks(file))
    servers = (server for task in tasks for server in task.mcp_config.values())
    known = variables()
    return {str(resolve(server.url, known)) for server in servers if isinstance(server, HttpServer)}


@contextmanager
def ensure_gateway(
    urls: Iterable[str],
    log_file: Path,
    *,
    words: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[list[int]]:
    """Have something listen on every address of this machine among `urls` (those of the tasks' servers).

    Where nothing listens, a gateway is started with the flags `words` and the variables `env` beside ours,
    its output appended to `log_file`, and ended with the context, or with this process. Yields those ports
    where one was started. Raises RunError, with its last lines, if one does not get ready.
    """
    with ExitStack() as stack:
        started = []
        for port in sorted({port for url in urls if (port := _local_port(url)) is not None}):
            if not _listens(port):
                stack.enter_context(_running(port, log_file, words, env or {}))
                started.append(port)
        yield started


def _local_port(url: str) -> int | None:
    """The port of an address on this machine; None for others, and for what is no address."""
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
        process = subprocess.Popen(
            [sys.executable, "-m", "buckeye", "gateway", "--port", str(port), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env, "BUCKEYE_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, port, log_file)
        log.info("Started a gateway for the tasks on port %d (log: %s)", port, log_file)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("The gateway on port %d did not end within %g s and is killed", port, _STOP_SECONDS)
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        ended = process.poll() is not None
        if _healthy(port):  # perhaps another one's, if two runs start at once; it serves as well
            return
        if ended or time.monotonic() > deadline:
            how = (
                f"ended with exit code {process.returncode}"
                if ended
                else f"is not ready after {_READY_SECONDS:g} s"
            )
            last = "\n".join(log_file.read_text(errors="replace").splitlines()[-5:])
            raise RunError(f"The gateway for the tasks' servers on port {port} {how}:\n{last}")
        time.sleep(_POLL_SECONDS)


def _healthy(port: int) -> bool:
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=_CONNECT_SECONDS, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200
