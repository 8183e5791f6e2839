"""Unreachable servers: wait for a local one, and explain failed connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from buckeye.base.request_gate import is_loopback
from buckeye.mcp.client.message_streams import JsonRepairStream
from buckeye.mcp.client.server_process import MAX_OUTPUT

# Wait for a local server that is not up, such as a gateway that died and is restarted.

_PAUSE_SECONDS = 0.2


async def wait_until_listening(url: str, seconds: float) -> None:
    """Wait up to `seconds` until a local address accepts connections; a later connect reports the error."""
    parts = urlsplit(url)
    if not seconds or not is_loopback(parts.hostname or ""):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                try:
                    _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
                except OSError:
                    await asyncio.sleep(_PAUSE_SECONDS)
                else:
                    writer.close()
                    return


# Explain a failed session with an HTTP server, and suggest a fix.

_WHERE_IT_IS = "correct the address, which usually ends in /mcp"


def redact_url(url: str) -> str:
    """Return the address without user, password and query, which may be secret."""
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def explain_unreachable(url: str, error: BaseException | None, error_status: int | None) -> str:
    """Return one sentence that explains a failed connection.

    `error_status` is the HTTP status of the first refused message, or None. `error` is the client's exception.
    """
    address = redact_url(url)
    causes = list(_causes(error))
    numbers = {one.errno for one in causes if isinstance(one, OSError)}
    if not urlsplit(url).hostname:
        return f"{address} is no address: write it as http://localhost:8765/mcp"
    if error_status in (401, 403):
        return (
            f"{address} refused with status {error_status}: check the key in the headers (of mcp_config in tasks; "
            "`rl init` takes it with --header)"
        )
    if error_status in (404, 405):
        there = "a server is there, and no MCP server at this path"
        return f"{address} answered with status {error_status}: {there}; {_WHERE_IT_IS}"
    if error_status is not None:
        return f"{address} answered with status {error_status} ({_first_line(error)}); look at what it prints"
    if any(isinstance(one, socket.gaierror) for one in causes):
        return f"{address}: the host {urlsplit(url).hostname} is not known; {_WHERE_IT_IS}"
    if errno.ECONNREFUSED in numbers or "attempts failed" in str(error):
        return f"{address}: nothing listens there (connection refused); start the server, or {_WHERE_IT_IS}"
    if any(isinstance(one, httpx2.TimeoutException) for one in causes):
        return f"{address} does not answer; is it up, and may this machine reach it?"
    if any(isinstance(one, httpx2.TransportError) for one in causes):
        return f"{address} cannot be reached: {_first_line(error)}"
    return f"{address} answers, but not as an MCP server ({_first_line(error)}); {_WHERE_IT_IS}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its chain of causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()  # loading them takes 20 ms


def _proxy_for(url: str) -> str | None:
    """Return the proxy that the environment sets for a URL, never one for this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return None if is_loopback(host) or proxy_bypass(host) else getproxies().get(parts.scheme)


class BoundedTransport(httpx2.AsyncBaseTransport):
    """HTTP transport that limits each answer to `MAX_OUTPUT` bytes and repairs the JSON in it.

    `error_status` is the first error status in answer to a message. `describe_end` reports the last one.
    """

    def __init__(self, url: str) -> None:
        self._inner = httpx2.AsyncHTTPTransport(verify=_certificates(), proxy=_proxy_for(url))
        self.flooded = ""
        self.error_status: int | None = None
        self._status: int | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request. The body of the returned response is bounded."""
        response = await self._inner.handle_async_request(request)
        if response.status_code >= 400 and request.method == "POST" and self.error_status is None:
            self.error_status = response.status_code
        if response.status_code >= 400 and response.status_code not in (404, 405):
            self._status = response.status_code
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        is_plain = response.headers.get("content-encoding", "identity") == "identity"
        kind = response.headers.get("content-type", "") if is_plain else ""
        response.stream = _Bounded(response.stream, self, JsonRepairStream(kind))
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    def describe_end(self) -> str:
        """Return the server's last error status as the suffix of a message, or ""."""
        if self._status in (401, 403):
            return f"it answered with status {self._status}: check the key in the task's headers"
        return "" if self._status is None else f"it answered with status {self._status}"


class _Bounded(httpx2.AsyncByteStream):
    def __init__(
        self, stream: httpx2.AsyncByteStream, owner: BoundedTransport, body: JsonRepairStream
    ) -> None:
        self._stream, self._owner, self._body = stream, owner, body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total = 0
        async for chunk in self._stream:
            total += len(chunk)
            if total > MAX_OUTPUT:
                self._owner.flooded = f"it answered with more than {MAX_OUTPUT // 2**20} MiB"
                raise httpx2.ReadError(self._owner.flooded)
            if ready := self._body.feed(chunk):
                yield ready
        if rest := self._body.rest():
            yield rest

    async def aclose(self) -> None:
        await self._stream.aclose()
