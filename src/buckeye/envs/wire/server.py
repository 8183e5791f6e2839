"""The loopback server of an event loop, and the endpoints on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

from buckeye.distribution import need
from buckeye.envs.base import Policy
from buckeye.envs.wire.app import WireApp
from buckeye.envs.wire.endpoint import Endpoint, Limits, Usage
from buckeye.envs.wire.rollout import Rollout

log = logging.getLogger(__name__)

_NO_LIMITS = Limits()
_KEEP_ALIVE_SECONDS = 120


@contextlib.asynccontextmanager
async def serve(
    policy: Policy, *, model: str = "policy", limits: Limits = _NO_LIMITS, environment: str = ""
) -> AsyncIterator[Endpoint]:
    """Serve `policy` to one rollout, under a private address and key, until the block ends.

    `environment` is whose settings are dropped, in the log. Calls that are open at the end are cancelled:
    when the block has ended, nothing more is recorded. Raises UsageError where no HTTP server is installed.
    """
    loopback = await _loopback()
    usage = Usage()
    rollout = Rollout(
        policy,
        model=model,
        limits=limits,
        usage=usage,
        tell=lambda setting: loopback.tell_once(environment, setting),
    )
    loopback.app.open(rollout)
    try:
        yield Endpoint(
            root_url=f"{loopback.url}/rollouts/{rollout.id}", api_key=rollout.key, model=model, usage=usage
        )
    finally:
        await loopback.app.close(rollout)


class _Loopback:
    """One server on a port of its own. It serves until its event loop ends."""

    def __init__(self) -> None:
        self.app = WireApp()
        self._server = _uvicorn_server(self.app)
        self._told: set[tuple[str, str]] = set()
        self._serving = asyncio.create_task(self._serve())
        self._started = asyncio.Event()
        self.url = ""

    async def started(self) -> None:
        """Wait until it takes requests. Raises what keeps it from that."""
        waiting = asyncio.create_task(self._started.wait())
        await asyncio.wait({waiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            waiting.cancel()
            self._serving.result()

    def tell_once(self, environment: str, setting: str) -> None:
        """Log that a setting is not followed, once for an environment."""
        if (environment, setting) in self._told:
            return
        self._told.add((environment, setting))
        log.warning(
            "%s sets %s in its requests: the run decides that, so it is not followed (said once)",
            f"The environment {environment}" if environment else "An environment",
            setting,
        )

    async def _serve(self) -> None:
        server = self._server
        listener = _listen()
        try:
            # The parts of uvicorn's `serve` without its signal handlers, which are ours, and without its
            # clock, which ticks ten times a second for a header that nobody reads.
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup(sockets=[listener])
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._started.set()
            await asyncio.Event().wait()
        finally:
            _LOOPBACKS.pop(asyncio.get_running_loop(), None)
            for one in getattr(server, "servers", ()):
                one.close()
            listener.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
            await asyncio.sleep(0)


_LOOPBACKS: dict[asyncio.AbstractEventLoop, _Loopback] = {}
"""The servers of the event loops that run; each takes itself out when its loop ends."""


async def _loopback() -> _Loopback:
    loop = asyncio.get_running_loop()
    if loop not in _LOOPBACKS:
        _LOOPBACKS[loop] = _Loopback()
    loopback = _LOOPBACKS[loop]
    await loopback.started()
    return loopback


def _listen() -> socket.socket:
    # asyncio sets TCP_NODELAY only on sockets that name their protocol
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    return listener


def _uvicorn_server(app: WireApp) -> Any:
    need("uvicorn", "An environment in a process of its own")
    import uvicorn

    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        interface="asgi3",
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
    )
    return uvicorn.Server(config)
