"""Access control of every HTTP server: it checks the key, the origin and the form of a request.

A page in a local browser can reach loopback servers, so the address of a client grants no access. A request
needs the key, and must pass these checks:

- `Host` names this server. This prevents DNS rebinding, where a third-party name points to this server.
- The request does not come from a web page that is not listed.
- The body is JSON, which a page cannot send without a preflight request.

This module imports only the standard library, because vLLM's server loads it in a separate environment.
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
_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", b"authorization, content-type, mcp-session-id, mcp-protocol-version"),
]


class Denial(NamedTuple):
    """Reason for refusing a request: HTTP status, code for programs, message for people."""

    status: int
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessRules:
    """Access rules of a server that listens on the address `host`.

    If `key` is None, only the paths in `public` and paths below them are served. If `public` is also None,
    all paths are served. `hosts` are additional names of the server that clients may use. `origins` are the
    web pages that may use the server.
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
        _check_host(headers, rules)
        or _check_origin(headers, scope, rules)
        or _check_key(headers, scope["path"], rules)
        or _check_body_type(headers)
    )


def _check_host(headers: Mapping[bytes, list[bytes]], rules: AccessRules) -> Denial | None:
    hosts = [_host_of(f"//{value.decode('latin-1')}") for value in headers.get(b"host", [b""])]
    if all(_is_own_host(host, rules) for host in hosts):
        return None
    expected = "localhost" if is_loopback(rules.host) else "the address of this server"
    return Denial(403, "host", f"unexpected Host header {hosts[0]!r}: use {expected}")


def _is_own_host(host: str, rules: AccessRules) -> bool:
    if host in {name.lower() for name in rules.hosts}:
        return True
    if is_loopback(rules.host):
        return is_loopback(host)
    if host == rules.host.lower() or is_loopback(host):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:  # not an address, so it must be a name of this machine
        own = socket.gethostname().lower()
        return host.partition(".")[0] == own.partition(".")[0] and host in (own, socket.getfqdn().lower())
    return True  # an address needs no DNS, so DNS rebinding is not possible


def _check_origin(
    headers: Mapping[bytes, list[bytes]], scope: Mapping[str, Any], rules: AccessRules
) -> Denial | None:
    own = {f"{scope.get('scheme', 'http')}://{value.decode('latin-1')}" for value in headers.get(b"host", [])}
    for value in headers.get(b"origin", []):
        origin = value.decode("latin-1")
        if origin not in rules.origins and origin not in own:
            return Denial(403, "origin", f"pages of {origin!r} may not use this server")
    return None


def _check_key(headers: Mapping[bytes, list[bytes]], path: str, rules: AccessRules) -> Denial | None:
    if path in _LIVENESS:
        return None
    if rules.key is None:
        public = rules.public
        if public is None or any(path == prefix or path.startswith(f"{prefix}/") for prefix in public):
            return None
        message = f"{path} controls the server and requires a key, but the server was started without one"
        return Denial(403, "no-key", message)
    scheme, _, key = headers.get(b"authorization", [b""])[0].partition(b" ")
    if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), rules.key.encode()):
        return None
    return Denial(401, "key", f"missing or wrong API key: {rules.key_hint}")


def _check_body_type(headers: Mapping[bytes, list[bytes]]) -> Denial | None:
    length = headers.get(b"content-length", [b"0"])[0]
    if length == b"0" and b"transfer-encoding" not in headers:
        return None
    kind = headers.get(b"content-type", [b""])[0].partition(b";")[0].strip().lower()
    if kind == b"application/json":
        return None
    message = (
        f"the body must be JSON (Content-Type: application/json), not {kind.decode('latin-1') or 'untyped'}"
    )
    return Denial(415, "type", message)


def openai_body(denial: Denial) -> bytes:
    """Return a refusal in OpenAI's error format."""
    kind = "authentication_error" if denial.status == 401 else "invalid_request_error"
    error = {"message": denial.message, "type": kind, "param": None, "code": denial.status}
    return json.dumps({"error": error}).encode()


class RequestGate:
    """ASGI middleware that refuses requests against the rules. `body` makes the body of a refusal."""

    def __init__(self, app: _App, rules: AccessRules, body: Callable[[Denial], bytes] = openai_body) -> None:
        self._app, self._rules, self._body = app, rules, body

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass the request on to the application, or reply with a refusal."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        if origin is not None and origin.decode("latin-1") in self._rules.origins:
            send = _allow_origin(origin, send)
            if scope.get("method") == "OPTIONS":  # preflight of a browser
                await _respond(send, 204, b"", _PREFLIGHT)
                return
        denial = find_denial(scope, self._rules)
        if denial is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": denial.message})
        else:
            challenge = [(b"www-authenticate", b"Bearer")] if denial.status == 401 else []
            headers = [(b"content-type", b"application/json"), *challenge]
            await _respond(send, denial.status, self._body(denial), headers)


def _allow_origin(origin: bytes, send: _Send) -> _Send:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            allowed = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
            message = {**message, "headers": [*message["headers"], *allowed]}
        await send(message)

    return send_with_headers


async def _respond(send: _Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
