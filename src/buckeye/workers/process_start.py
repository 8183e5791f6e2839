"""Start the process of a worker: by path, in another interpreter, with none of our modules."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from buckeye.base.keys import key
from buckeye.base.process import clean_environment
from buckeye.base.process_guard import GUARD
from buckeye.envs import stdlib_only
from buckeye.envs.settings import WorkerSettings
from buckeye.workers import worker_side
from buckeye.workers.errors import WorkerFault
from buckeye.workers.worker_side.frames import (
    encode,
)

MAIN = Path(worker_side.__file__).with_name("main.py")
_SHARED = Path(stdlib_only.__file__).parent
_SEEN = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    *("XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
)
"""Where data is kept and how the network is reached. Keys are not among them."""
_WORKER = (str(MAIN),)
_RELAY = ("-m", "buckeye.workers.relay")
LOOPBACK = "127.0.0.1"
WORKERS_KEY = "BUCKEYE_WORKERS_KEY"
"""The variable with the key of a run's hosts of workers."""


def worker_variables(named: Iterable[str], policy: str = LOOPBACK) -> dict[str, str]:
    """The environment variables of a worker: `named` ones as far as they are there, also in the key files,
    and what it needs to find its files and the network. The way to this machine itself, and to the host where
    the `policy` is, never leads over a proxy."""
    found = {name: os.environ[name] for name in _SEEN if name in os.environ}
    found |= {name: value for name in named if (value := key(name))}
    direct = ",".join(filter(None, ("127.0.0.1,localhost", policy, os.environ.get("NO_PROXY"))))
    return clean_environment(found | {"NO_PROXY": direct, "no_proxy": direct})


async def start_elsewhere(
    python: Path, settings: WorkerSettings, place: tuple[str, int]
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """The same for a worker on the node where a host of workers listens at `place`; the process is the one
    that stands in for it here."""
    process, ours = await start_process(Path(sys.executable), clean_environment({}), _RELAY)
    variables = {name: value for name in settings.variables if (value := key(name))}
    begin = {
        "type": "start",
        "host": place[0],
        "port": place[1],
        "seconds": settings.start_timeout / 2,
        "key": os.environ.get(WORKERS_KEY, ""),
        "python": str(python),
        "variables": variables,
        "policy": settings.address,
        "max_memory_bytes": settings.max_memory_bytes,
    }
    ours.sendall(encode(begin))
    return process, ours


async def start_process(
    python: Path, variables: dict[str, str], words: Sequence[str] = _WORKER
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """A new worker process and our end of its connection. Raises WorkerFault if it cannot be started."""
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-I", "-u", *words, "--fd", str(number), "--parent", str(os.getpid())),
            *("--shared", str(_SHARED)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=variables,
            pass_fds=[number],
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise WorkerFault("start", f"{python} cannot be run: {error.strerror}") from None
    finally:
        theirs.close()
    GUARD.watch(process.pid)
    return process, ours
