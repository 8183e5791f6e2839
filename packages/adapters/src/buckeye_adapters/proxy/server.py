"""The loopback server of an event loop, and the endpoints on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from buckeye.base.distribution import need
from buckeye.base.request_gate import Gate, Rules
from buckeye.envs.base import Policy
from buckeye_adapters.proxy.app import WireApp
from buckeye_adapters.proxy.endpoint import Endpoint, Limits, Usage
from buckeye_adapters.proxy.rollout import Rollout

log = logging.getLogger(__name__)

_NO_LIMITS = Limits()
LOOPBACK = "127.0.0.1"


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
        self._server = _loopback_server(self.app)
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

        listener = listen(LOOPBACK, 0, change="Close some programs.")
        try:
            # The parts of uvicorn's `serve` without its signal handlers, which are ours, and without its
            # clock, which ticks ten times a second for a header that nobody reads.
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup(sockets=[listener])
            self.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
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


def _loopback_server(app: WireApp) -> Any:
    need("uvicorn", "An environment in a process of its own")
    from buckeye.base.http_server import http_server

    gate = Gate(app, Rules(host=LOOPBACK, key=None))  # type: ignore[arg-type]  # every rollout has a key of its own
    return http_server(gate, server_header=False, date_header=False)
