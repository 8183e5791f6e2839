"""HTTP servers of the proxy, one per event loop and host, and the endpoints on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from buckeye.base.distribution import need
from buckeye.base.request_gate import AccessRules, RequestGate
from buckeye.envs.base import Policy
from buckeye.workers.proxy.app import WireApp
from buckeye.workers.proxy.endpoint import Endpoint, Limits, Usage
from buckeye.workers.proxy.rollout import ProxyRollout

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

    `environment` is the name that warnings about ignored settings use. The end of the block cancels open
    calls. `endpoint.usage` does not change after the block. Raises UsageError if uvicorn is not installed.
    """
    server = await _server(host)
    usage = Usage()
    rollout = ProxyRollout(
        policy,
        model=model,
        limits=limits,
        usage=usage,
        on_ignored_setting=lambda setting: server.log_once(environment, setting),
    )
    server.app.open(rollout)
    try:
        yield Endpoint(
            root_url=f"{server.url}/rollouts/{rollout.id}", api_key=rollout.key, model=model, usage=usage
        )
    finally:
        await server.app.close(rollout)


class _Server:
    """One server on a free port of `host`. It serves until its event loop ends."""

    def __init__(self, host: str) -> None:
        self.app, self._host = WireApp(), host
        self._server = _http_server(self.app, host)
        self._logged: set[tuple[str, str]] = set()
        self._serving = asyncio.create_task(self._serve())
        self._started = asyncio.Event()
        self.url = ""

    async def started(self) -> None:
        """Wait until the server accepts requests. Raises the exception of a failed start."""
        waiting = asyncio.create_task(self._started.wait())
        await asyncio.wait({waiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            waiting.cancel()
            self._serving.result()

    def log_once(self, environment: str, setting: str) -> None:
        """Log that a setting is ignored, once per environment and setting."""
        if (environment, setting) in self._logged:
            return
        self._logged.add((environment, setting))
        log.warning(
            "%s: ignoring `%s` in its requests, because the run's settings apply (logged once)",
            f"environment {environment}" if environment else "an environment",
            setting,
        )

    async def _serve(self) -> None:
        server = self._server
        from buckeye.base.http_server import listen

        listener = listen(self._host, 0, change="Close other programs.")
        try:
            # These are the steps of uvicorn's `serve`, except two. Buckeye has its own signal handlers, and
            # does not need the timer that updates a header ten times per second.
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup(sockets=[listener])
            self.url = f"http://{self._host}:{listener.getsockname()[1]}"
            self._started.set()
            await asyncio.Event().wait()
        finally:
            _SERVERS.pop((asyncio.get_running_loop(), self._host), None)
            for asyncio_server in getattr(server, "servers", ()):
                asyncio_server.close()
            listener.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
            await asyncio.sleep(0)


_SERVERS: dict[tuple[asyncio.AbstractEventLoop, str], _Server] = {}
"""Servers by event loop and host. A server removes itself when its event loop ends."""


async def _server(host: str) -> _Server:
    key = asyncio.get_running_loop(), host
    if key not in _SERVERS:
        _SERVERS[key] = _Server(host)
    server = _SERVERS[key]
    await server.started()
    return server


def _http_server(app: WireApp, host: str) -> Any:
    need("uvicorn", "An environment in a worker process")
    from buckeye.base.http_server import http_server

    gate = RequestGate(app, AccessRules(host=host, key=None))  # type: ignore[arg-type]  # every rollout has its own key
    return http_server(gate, server_header=False, date_header=False)
