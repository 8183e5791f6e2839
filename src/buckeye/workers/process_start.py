"""Start of a worker process. It runs `main.py` by path, in an interpreter that may not have Buckeye."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from buckeye.base.keys import key
from buckeye.base.process import PROGRESS_BAR_SWITCHES, clean_environment
from buckeye.base.process_guard import GUARD
from buckeye.envs import stdlib_only
from buckeye.envs.settings import WorkerSettings
from buckeye.workers import worker_side
from buckeye.workers.errors import WorkerError
from buckeye.workers.worker_side.frames import encode

WORKER_MAIN = Path(worker_side.__file__).with_name("main.py")
SHARED_FOLDER = Path(stdlib_only.__file__).parent
"""Folder of the code that workers share with Buckeye."""
_PASSED_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    *PROGRESS_BAR_SWITCHES,
    *("XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
)
"""Environment variables that every worker gets, for data folders and network access. They contain no keys."""
_WORKER = (str(WORKER_MAIN),)
_RELAY = ("-m", "buckeye.workers.relay")
LOOPBACK = "127.0.0.1"
WORKERS_KEY = "BUCKEYE_WORKERS_KEY"
"""Environment variable with the key that a run's worker hosts require."""


def worker_variables(named: Iterable[str], policy: str = LOOPBACK) -> dict[str, str]:
    """Return the environment variables of a worker.

    They are the `named` variables that this process or the key files have, and `_PASSED_VARIABLES`.
    Connections to this machine and to the host `policy` bypass HTTP proxies.
    """
    variables = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    variables |= {name: value for name in named if (value := key(name))}
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    no_proxy = ",".join(filter(None, ("127.0.0.1,localhost", policy, given)))
    return clean_environment(variables | {"NO_PROXY": no_proxy, "no_proxy": no_proxy})


async def start_remote_worker(
    python: Path, settings: WorkerSettings, host_address: tuple[str, int]
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start a worker on the node whose worker host listens at `host_address`.

    Return the process of the relay, which runs on this machine and forwards data to the worker, and the
    connection to the relay.
    """
    process, connection = await start_process(Path(sys.executable), clean_environment({}), _RELAY)
    variables = {name: value for name in settings.variables if (value := key(name))}
    request = {
        "type": "start",
        "host": host_address[0],
        "port": host_address[1],
        "seconds": settings.start_timeout / 2,
        "key": os.environ.get(WORKERS_KEY, ""),
        "python": str(python),
        "variables": variables,
        "policy": settings.address,
        "max_memory_bytes": settings.max_memory_bytes,
    }
    connection.sendall(encode(request))
    return process, connection


async def start_process(
    python: Path, variables: dict[str, str], args: Sequence[str] = _WORKER
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start a worker process, and return the process and Buckeye's side of the connection.

    Raises WorkerError if the process cannot be started.
    """
    connection, worker_end = socket.socketpair()
    fd = worker_end.fileno()
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-I", "-u", *args, "--fd", str(fd), "--parent", str(os.getpid())),
            *("--shared", str(SHARED_FOLDER)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=variables,
            pass_fds=[fd],
            start_new_session=True,
        )
    except OSError as error:
        connection.close()
        raise WorkerError("start", f"cannot start {python}: {error.strerror}") from None
    finally:
        worker_end.close()
    GUARD.watch(process.pid)
    return process, connection
