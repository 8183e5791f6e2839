"""Access control in front of every HTTP server: the key, the origin and the form of a request.

A page in a local browser can reach loopback servers, so an address grants no access. The key does. In
addition, a request must name this server in `Host` (otherwise a third-party name may point here, DNS
rebinding), must not come from an unlisted page, and must be JSON, which a page cannot send without a
preflight.

Imports only the standard library: vLLM's server, in a separate environment, loads this file too.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

_LIVENESS = frozenset({"/health", "/ping"})
_POLICY_VIOLATION = 1008  # RFC 6455, 7.4.1


class Denial(NamedTuple):
    """Reason for refusing a request: HTTP status, code for programs, message for people."""

    status: int
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessRules:
    """Access rules of a server on the address `host`.

    Without a `key` only the paths in `public`, and those below them, are served; None means all. `hosts` are
    additional names that clients may use, `origins` the pages that may use it.
    """

    host: str
    key: str | None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    public: tuple[str, ...] | None = None
    key_hint: str = "send `Authorization: Bearer <key>`"


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def find_denial(scope: Mapping[str, Any], rules: AccessRules) -> Denial | None:
    """Return the reason for refusing a request (an ASGI scope), or None if it is admitted."""
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.lower(), []).append(value)
    return (
        _foreign_host(headers, rules)
        or _foreign_page(headers, scope, rules)
        or _without_key(headers, scope["path"], rules)
        or _not_json(headers)
    )


def _foreign_host(headers: Mapping[bytes, list[bytes]], rules: AccessRules) -> Denial | None:
    given = [_host_of(f"//{value.decode('latin-1')}") for value in headers.get(b"host", [b""])]
    if all(_is_ours(host, rules) for host in given):
        return None
    reached = "localhost" if is_loopback(rules.host) else "its address"
    return Denial(403, "host", f"This server answers to {reached}, and not to Host: {given[0]!r}.")


def _is_ours(host: str, rules: AccessRules) -> bool:
    if host in {name.lower() for name in rules.hosts}:
        return True
    if is_loopback(rules.host):
        return is_loopback(host)
    if host == rules.host.lower() or is_loopback(host):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:  # not an address: must be a name of this machine
        own = socket.gethostname().lower()
        return host.partition(".")[0] == own.partition(".")[0] and host in (own, socket.getfqdn().lower())
    return True  # no name was resolved, so none can point here maliciously


def _foreign_page(
    headers: Mapping[bytes, list[bytes]], scope: Mapping[str, Any], rules: AccessRules
) -> Denial | None:
    own = {f"{scope.get('scheme', 'http')}://{value.decode('latin-1')}" for value in headers.get(b"host", [])}
    for value in headers.get(b"origin", []):
        origin = value.decode("latin-1")
        if origin not in rules.origins and origin not in own:
            return Denial(403, "origin", f"Pages of {origin!r} may not use this server.")
    return None


def _without_key(headers: Mapping[bytes, list[bytes]], path: str, rules: AccessRules) -> Denial | None:
    if path in _LIVENESS:
        return None
    if rules.key is None:
        if rules.public is None or any(path == one or path.startswith(f"{one}/") for one in rules.public):
            return None
        return Denial(
            403, "no-key", f"{path} steers the server, which was started without a key: start it with one."
        )
    scheme, _, given = headers.get(b"authorization", [b""])[0].partition(b" ")
    if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), rules.key.encode()):
        return None
    return Denial(401, "key", f"This server asks for its API key: {rules.key_hint}.")


def _not_json(headers: Mapping[bytes, list[bytes]]) -> Denial | None:
    length = headers.get(b"content-length", [b"0"])[0]
    if length == b"0" and b"transfer-encoding" not in headers:
        return None
    kind = headers.get(b"content-type", [b""])[0].partition(b";")[0].strip().lower()
    if kind == b"application/json":
        return None
    shown = kind.decode("latin-1") or "none"
    return Denial(415, "type", f"The body must be JSON (Content-Type: application/json), not {shown}.")


def openai_body(why: Denial) -> bytes:
    """Return a refusal in OpenAI's error format."""
    kind = "authentication_error" if why.status == 401 else "invalid_request_error"
    error = {"message": why.message, "type": kind, "param": None, "code": why.status}
    return json.dumps({"error": error}).encode()


class RequestGate:
    """ASGI middleware that admits requests by the rules. `body` formats the JSON of a refusal."""

    def __init__(self, app: _App, rules: AccessRules, body: Callable[[Denial], bytes] = openai_body) -> None:
        self._app, self._rules, self._body = app, rules, body

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass the request on, or reply with a refusal."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        if origin is not None and origin.decode("latin-1") in self._rules.origins:
            send = _readable_by(origin, send)
            if scope.get("method") == "OPTIONS":  # preflight of a browser
                await _answer(send, 204, b"", _PREFLIGHT)
                return
        why = find_denial(scope, self._rules)
        if why is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": why.message})
        else:
            asks = [(b"www-authenticate", b"Bearer")] if why.status == 401 else []
            await _answer(send, why.status, self._body(why), [(b"content-type", b"application/json"), *asks])


_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", b"authorization, content-type, mcp-session-id, mcp-protocol-version"),
]


def _readable_by(origin: bytes, send: _Send) -> _Send:
    async def marked(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            allowed = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
            message = {**message, "headers": [*message["headers"], *allowed]}
        await send(message)

    return marked


async def _answer(send: _Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    own = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [own, *headers]})
    await send({"type": "http.response.body", "body": body})


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
