"""HTTP connections to servers: wait for a local server, explain failures, and limit responses."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from buckeye.base.request_gate import is_loopback
from buckeye.errors import first_line
from buckeye.mcp.client.message_streams import JsonRepairStream
from buckeye.mcp.client.server_process import MAX_OUTPUT

_POLL_SECONDS = 0.2
_FIX_URL = "correct the URL; it usually ends in `/mcp`"


async def wait_until_listening(url: str, seconds: float) -> None:
    """Wait up to `seconds` until a server on this machine accepts connections, such as a restarting gateway.

    Never raises, because the caller's own connection attempt reports the error.
    """
    parts = urlsplit(url)
    if not seconds or not is_loopback(parts.hostname or ""):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                try:
                    _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
                except OSError:
                    await asyncio.sleep(_POLL_SECONDS)
                else:
                    writer.close()
                    return


def redact_url(url: str) -> str:
    """Return the URL without its user, password and query, which may be secret."""
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def explain_unreachable(url: str, error: BaseException | None, error_status: int | None) -> tuple[str, str]:
    """Return the reason for a failed connection, and a hint for the user.

    `error` is the exception of the HTTP client. `error_status` is the HTTP status of the first rejected
    message, or None.
    """
    address = redact_url(url)
    status = f"{address} replied with status {error_status}"
    if not urlsplit(url).hostname:
        return f"{address} is not a URL", "write it as `http://localhost:8765/mcp`"
    if error_status in (401, 403):
        return status, "check the key in the `headers` of the server (`rl init` takes them with `--header`)"
    if error_status in (404, 405):
        return f"{status}: no MCP server at this path", _FIX_URL
    if error_status is not None:
        return f"{status}: {first_line(error)}", "check the output of the server"
    if isinstance(error, httpx2.TransportError):
        hint = f"start the server, check that this machine can reach it, or {_FIX_URL}"
        return f"cannot connect to {address}: {first_line(error)}", hint
    return f"{address} does not reply as an MCP server: {first_line(error)}", _FIX_URL


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes 20 ms


def _proxy_for(url: str) -> str | None:
    """Return the proxy for a URL from the environment variables, or None for addresses of this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return None if is_loopback(host) or proxy_bypass(host) else getproxies().get(parts.scheme)


class BoundedTransport(httpx2.AsyncBaseTransport):
    """HTTP transport that limits each response to `MAX_OUTPUT` bytes and repairs the JSON of the response.

    `error_status` is the status of the first message that the server rejected. `describe_end` returns the
    status of the last rejected message.
    """

    def __init__(self, url: str) -> None:
        self._inner = httpx2.AsyncHTTPTransport(verify=_certificates(), proxy=_proxy_for(url))
        self.flood = ""
        self.error_status: int | None = None
        self._last_status: int | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request. Return a response whose body raises an error above `MAX_OUTPUT` bytes."""
        response = await self._inner.handle_async_request(request)
        if response.status_code >= 400 and request.method == "POST" and self.error_status is None:
            self.error_status = response.status_code
        if response.status_code >= 400 and response.status_code not in (404, 405):
            self._last_status = response.status_code
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        is_plain = response.headers.get("content-encoding", "identity") == "identity"
        content_type = response.headers.get("content-type", "") if is_plain else ""
        response.stream = _BoundedStream(response.stream, self, JsonRepairStream(content_type))
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    def describe_end(self) -> str:
        """Return the server's last error status as text to append to an error message, or ""."""
        if self._last_status in (401, 403):
            return f"last reply: status {self._last_status}; check the key in the `headers` of the server"
        return "" if self._last_status is None else f"last reply: status {self._last_status}"


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(
        self, stream: httpx2.AsyncByteStream, owner: BoundedTransport, body: JsonRepairStream
    ) -> None:
        self._stream, self._owner, self._body = stream, owner, body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total = 0
        async for chunk in self._stream:
            total += len(chunk)
            if total > MAX_OUTPUT:
                self._owner.flood = f"a response is larger than {MAX_OUTPUT // 2**20} MiB"
                raise httpx2.ReadError(self._owner.flood)
            if ready := self._body.feed(chunk):
                yield ready
        if rest := self._body.rest():
            yield rest

    async def aclose(self) -> None:
        await self._stream.aclose()
