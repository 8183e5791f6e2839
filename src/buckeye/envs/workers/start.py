"""How the process of a worker is started: by path, in another interpreter, with nothing of ours around it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from buckeye.envs.mcp.guard import GUARD
from buckeye.envs.mcp.server_process import clean_environment
from buckeye.envs.workers.errors import WorkerFault
from buckeye.tasks.keys import key

MAIN = Path(__file__).with_name("guest") / "main.py"
_SEEN = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    *("XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
)
"""Where data is kept and how the network is reached. Keys are not among them."""


def worker_variables(named: Iterable[str]) -> dict[str, str]:
    """The environment variables of a worker: `named` ones as far as they are there, also in the key files,
    and what it needs to find its files and the network. The way to this machine itself never leads over a
    proxy."""
    found = {name: os.environ[name] for name in _SEEN if name in os.environ}
    found |= {name: value for name in named if (value := key(name))}
    direct = ",".join(filter(None, ("127.0.0.1,localhost", os.environ.get("NO_PROXY"))))
    return clean_environment(found | {"NO_PROXY": direct, "no_proxy": direct})


async def start_process(
    python: Path, variables: dict[str, str]
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """A new worker process and our end of its connection. Raises WorkerFault if it cannot be started."""
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-I", "-u", str(MAIN), "--fd", str(number), "--parent", str(os.getpid())),
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
