"""HTTP to a server that may answer too much, or with a status that has to be told."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from buckeye_mcp.client.server_process import MAX_OUTPUT


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading them takes 20 ms


def _proxy_for(url: str) -> str | None:
    """The proxy that the environment names for a URL; never one for this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host == "localhost" or host.startswith("127.") or host == "::1" or proxy_bypass(host):
        return None
    return getproxies().get(parts.scheme)


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Cuts off answers longer than `MAX_OUTPUT` bytes and remembers the last status that was an error;
    `refusal` is the first one that a message was answered with."""

    def __init__(self, url: str) -> None:
        self._inner = httpx2.AsyncHTTPTransport(verify=_certificates(), proxy=_proxy_for(url))
        self.flooded = ""
        self.refusal: int | None = None
        self._status: int | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request; the answer's body is bounded."""
        response = await self._inner.handle_async_request(request)
        if response.status_code >= 400 and request.method == "POST" and self.refusal is None:
            self.refusal = response.status_code
        if response.status_code >= 400 and response.status_code not in (404, 405):
            self._status = response.status_code
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream, self)
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    def last_words(self) -> str:
        """What the server's last refusal was, to be put behind a message; "" if there was none."""
        if self._status in (401, 403):
            return f"it answered with status {self._status}: check the key in the task's headers"
        return "" if self._status is None else f"it answered with status {self._status}"


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, owner: BoundedTransport) -> None:
        self._stream = stream
        self._owner = owner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total = 0
        async for chunk in self._stream:
            total += len(chunk)
            if total > MAX_OUTPUT:
                self._owner.flooded = f"it answered with more than {MAX_OUTPUT // 2**20} MiB"
                raise httpx2.ReadError(self._owner.flooded)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
