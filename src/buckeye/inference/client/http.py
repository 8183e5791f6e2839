"""Keep-alive HTTP connections to one server, whose cost per request does not depend on their number."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools
import httpx

from buckeye.inference.types import ARRAYS_TYPE

_SIMULTANEOUS_CONNECTS = 64  # fewer than the 128 connections that a server's queue holds by default


@dataclass(frozen=True, slots=True)
class Reply:
    """Status, body and content type of an HTTP reply."""

    status: int
    body: bytes
    content_type: str


class Connections:
    """HTTP connections to the server of `url`. A request uses an idle connection, or else a new one."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = httpx.create_ssl_context() if parts.scheme == "https" else None
        self._path = parts.path
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        types = f"accept: {ARRAYS_TYPE}, application/json\r\ncontent-type: application/json\r\n"
        self._headers = f"host: {parts.netloc.rpartition('@')[2]}\r\n{key}{types}"
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._connects = asyncio.Semaphore(_SIMULTANEOUS_CONNECTS)

    async def request(self, method: str, route: str, body: bytes = b"") -> Reply:
        """Send a request and return the reply. Raise `OSError` if the connection breaks before its end."""
        head = f"{method} {self._path}{route} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        connection = self._take_idle() or await self._connect()
        try:
            connection.send(head.encode(), body)
            del body  # it may be long, and so is the time until the reply
            reply = await connection.reply()
        except BaseException:
            connection.abort()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.abort()
        return reply

    def close(self) -> None:
        """Close all connections, including those of cancelled requests."""
        for connection in tuple(self._open):
            connection.abort()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection in self._open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        async with self._connects:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self._open), self._host, self._port, ssl=self._tls
            )
        return connection


class _Connection(asyncio.Protocol):
    """Connection that carries one request at a time. It is in `connections` while it is open."""

    def __init__(self, connections: set[_Connection]) -> None:
        self._connections = connections
        self._reply: asyncio.Future[Reply] | None = None
        self.is_reusable = True

    def send(self, head: bytes, body: bytes) -> None:
        self._reply = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._has_length = self._has_headers = False
        self._content_type = ""
        self._transport.write(head + body)

    async def reply(self) -> Reply:
        assert self._reply is not None
        try:
            return await self._reply
        finally:
            self._body, self._reply = [], None

    def abort(self) -> None:
        self._connections.discard(self)
        self._transport.abort()

    # --- events of the connection ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            self.abort()  # the server sent more than one reply
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the reply is not HTTP: {error}"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        if error is None and self._reply is not None and self._has_headers and not self._has_length:
            self.on_message_complete()  # the end of the connection is the end of the body
        self._fail(error or ConnectionError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)

    # --- events of the parser ---

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._has_length |= name in (b"content-length", b"transfer-encoding")
        if name == b"content-type":
            self._content_type = value.decode("latin-1").partition(";")[0].strip()

    def on_headers_complete(self) -> None:
        self._has_headers = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_reusable = self._has_length and self._parser.should_keep_alive()
        if self._reply is not None and not self._reply.done():
            body = b"".join(self._body)
            self._reply.set_result(Reply(self._parser.get_status_code(), body, self._content_type))
