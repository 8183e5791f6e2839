"""Common parts of all HTTP servers: the listening socket, and a limit on open connections."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from buckeye.errors import PortTakenError

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 4096
_SPARE_DESCRIPTORS = 24  # for files, pipes and processes of the server
_ACCEPT_BACKLOG = 1  # asyncio's `backlog`: connections that it accepts before the server can close any
_QUEUE_LENGTH = 1024
_LOG_SECONDS = 10.0


def listen(host: str, port: int, *, change: str) -> socket.socket:
    """Return a listening socket. While the server starts, no other server can take the port.

    Raise `PortTakenError`, with the hint `change`, if the port is unavailable.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol. Without TCP_NODELAY, replies take
    # 40 ms longer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_QUEUE_LENGTH)
    except (OSError, OverflowError) as error:
        listener.close()
        reason, hint = getattr(error, "strerror", None) or error, change.removesuffix(".") or None
        if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            hint = "set the host to an address of this machine, such as 127.0.0.1"
        raise PortTakenError(f"cannot listen on {host}:{port}: {reason}", hint=hint) from error
    return listener


def http_server(app: Any, **settings: Any) -> uvicorn.Server:
    """Return a uvicorn server for an ASGI application. `settings` are further settings of uvicorn.

    The server writes no access log, and does not change signal handlers.
    """
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=BoundedProtocol,
        backlog=_ACCEPT_BACKLOG,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=120,
        **settings,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_QUEUE_LENGTH)  # asyncio reduced the queue to its backlog


class BoundedProtocol(H11Protocol):
    """HTTP connection that closes another connection if too many are open.

    Too many means more than 4,096, or more than the limit of open files allows. The connection that has been
    idle for the longest time is closed.
    """

    _idle_since = 0.0
    _closed_count, _logged_at = 0, 0.0

    def connection_made(self, transport: Any) -> None:
        """Accept this connection. If too many are open, close the idlest one, or this one if none is idle."""
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        if _are_too_many(len(self.connections)):
            self._make_room()

    def on_response_complete(self) -> None:
        """Mark the connection as idle."""
        self._idle_since = time.monotonic()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Reply 400 to invalid HTTP, and discard the reply of the application to the current request."""
        super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        others = [peer for peer in self.connections if isinstance(peer, BoundedProtocol) and peer is not self]
        idle = [peer for peer in others if peer._is_idle]
        closed = min(idle, key=lambda peer: peer._idle_since, default=self)
        closed.transport.abort()
        self.connections.discard(closed)
        BoundedProtocol._closed_count += 1
        if time.monotonic() - BoundedProtocol._logged_at > _LOG_SECONDS:
            BoundedProtocol._logged_at = time.monotonic()
            log.warning("too many connections: %d closed, idle ones first", BoundedProtocol._closed_count)


def _are_too_many(connections: int) -> bool:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if connections > _MAX_CONNECTIONS or 4 * connections < limit:
        return connections > _MAX_CONNECTIONS
    return len(os.listdir("/dev/fd")) > limit - _SPARE_DESCRIPTORS
