"""The servers of an event loop, and the endpoints on them: on the loopback, or where other nodes reach it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from buckeye.base.distribution import need
from buckeye.base.request_gate import Gate, Rules
from buckeye.envs.base import Policy
from buckeye.workers.proxy.app import WireApp
from buckeye.workers.proxy.endpoint import Endpoint, Limits, Usage
from buckeye.workers.proxy.rollout import Rollout

log = logging.getLogger(__name__)

_NO_LIMITS = Limits()
LOOPBACK = "127.0.0.1"


@contextlib.asynccontextmanager
async def serve(
    policy: Policy,
    *,
    model: str = "policy",
    limits: Limits = _NO_LIMITS,
    environment: str = "",
    host: str = LOOPBACK,
) -> AsyncIterator[Endpoint]:
    """Serve `policy` to one rollout, under a private address and key, until the block ends.

    `environment` is whose settings are dropped, in the log. Calls that are open at the end are cancelled:
    when the block has ended, nothing more is recorded. Raises UsageError where no HTTP server is installed.
    """
    server = await _server(host)
    usage = Usage()
    rollout = Rollout(
        policy,
        model=model,
        limits=limits,
        usage=usage,
        tell=lambda setting: server.tell_once(environment, setting),
    )
    server.app.open(rollout)
    try:
        yield Endpoint(
            root_url=f"{server.url}/rollouts/{rollout.id}", api_key=rollout.key, model=model, usage=usage
        )
    finally:
        await server.app.close(rollout)


class _Server:
    """One server on a port of its own of `host`. It serves until its event loop ends."""

    def __init__(self, host: str) -> None:
        self.app, self._host = WireApp(), host
        self._server = _http_server(self.app, host)
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
        from buckeye.base.http_server import listen

        listener = listen(self._host, 0, change="Close some programs.")
        try:
            # The parts of uvicorn's `serve` without its signal handlers, which are ours, and without its
            # clock, which ticks ten times a second for a header that nobody reads.
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup(sockets=[listener])
            self.url = f"http://{self._host}:{listener.getsockname()[1]}"
            self._started.set()
            await asyncio.Event().wait()
        finally:
            _SERVERS.pop((asyncio.get_running_loop(), self._host), None)
            for one in getattr(server, "servers", ()):
                one.close()
            listener.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
            await asyncio.sleep(0)


_SERVERS: dict[tuple[asyncio.AbstractEventLoop, str], _Server] = {}
"""The servers of the event loops that run, by their hosts; each takes itself out when its loop ends."""


async def _server(host: str) -> _Server:
    place = asyncio.get_running_loop(), host
    if place not in _SERVERS:
        _SERVERS[place] = _Server(host)
    server = _SERVERS[place]
    await server.started()
    return server


def _http_server(app: WireApp, host: str) -> Any:
    need("uvicorn", "An environment in a process of its own")
    from buckeye.base.http_server import http_server

    gate = Gate(app, Rules(host=host, key=None))  # type: ignore[arg-type]  # every rollout has a key of its own
    return http_server(gate, server_header=False, date_header=False)
