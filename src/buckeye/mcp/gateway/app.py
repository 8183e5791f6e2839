"""HTTP routes of the gateway: MCP streamable HTTP at /mcp, /health and /status.

In protocol revisions with a handshake, an `initialize` request without the header `Mcp-Session-Id` opens a
session. Later requests name the session in this header. Revision 2026-07-28 has no sessions. The gateway
rejects its requests and lists the revisions with sessions, so that the client can use an older revision.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from buckeye.base.request_gate import AccessRules, Denial, RequestGate
from buckeye.mcp.gateway.channel import Channel
from buckeye.mcp.gateway.gateway import Gateway
from buckeye.mcp.gateway.json_rpc import (
    HANDSHAKE_VERSIONS,
    UNSUPPORTED_VERSION,
    JsonRpcMessage,
    RequestId,
    error_response,
    parse_message,
)
from buckeye.mcp.gateway.session import GatewaySession
from buckeye.mcp.gateway.settings import API_KEY_VARIABLE, GatewayError, read_launch_request

log = logging.getLogger(__name__)

SESSION_HEADER = "mcp-session-id"
MAX_BODY_BYTES = 16 * 2**20
_PING_SECONDS, _PING = 15.0, b": ping\r\n\r\n"
_INVALID_REQUEST = -32600
_SSE_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


def create_app(gateway: Gateway) -> RequestGate:
    """Return the web application that serves `gateway`. Its gate rejects clients without access."""
    endpoint = _Endpoint(gateway)
    methods = ["GET", "POST", "DELETE"]
    app = Starlette(
        routes=[
            Route("/mcp", endpoint.mcp, methods=methods),
            Route("/mcp/", endpoint.mcp, methods=methods),
            Route("/health", endpoint.health),
            Route("/status", endpoint.status),
        ]
    )
    settings = gateway.settings
    rules = AccessRules(
        host=settings.host,
        key=settings.api_key,
        hosts=settings.hosts,
        origins=settings.origins,
        key_hint=f"send the gateway's {API_KEY_VARIABLE} as `Authorization: Bearer ...`",
    )
    return RequestGate(app, rules, _denial_body)  # type: ignore[arg-type]


def _denial_body(denial: Denial) -> bytes:
    return error_response(None, _INVALID_REQUEST, denial.message, {"reason": denial.reason})


class _Endpoint:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, request: Request) -> Response:
        return _json(b'{"status":"ok"}')

    async def status(self, request: Request) -> Response:
        return _json(json.dumps(self._gateway.status()).encode())

    async def mcp(self, request: Request) -> Response:
        frame = None
        try:
            if request.method == "GET":
                return self._stream(request)
            if request.method == "DELETE":
                return self._delete(request)
            body = await _read_body(request)
            frame = parse_message(body)
            return await self._post(request, frame, body)
        except GatewayError as refusal:
            return _error_reply(refusal, frame.id if frame is not None and frame.is_request else None)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            log.exception("Unexpected error in a request")
            defect = GatewayError(
                500, "defect", f"unexpected {type(error).__name__} in the gateway", code=-32603
            )
            return _error_reply(defect, frame.id if frame is not None and frame.is_request else None)

    async def _post(self, request: Request, frame: JsonRpcMessage, body: bytes) -> Response:
        session, headers = await self._session(request, frame)
        if not frame.is_request:
            await session.forward(body)
            return Response(status_code=202)
        request_id = frame.id
        assert request_id is not None
        is_first = session.requests == 0
        channel = await session.forward_request(frame, body)
        disconnected = asyncio.create_task(_wait_for_disconnect(request))
        try:
            message = await self._first_message(session, channel, disconnected, is_first=is_first)
        finally:
            disconnected.cancel()
        if message is None and disconnected.done() and not disconnected.cancelled():
            session.abandon(request_id)
            if is_first:
                session.end("the client disconnected during the start")
            return Response(status_code=499)
        if channel.finished and message is not None:
            return _json(message, status=502 if channel.broken else 200, headers=headers)
        first = _event(message) if message is not None else _PING
        return _EventStream(channel, first, lambda: session.abandon(request_id), headers)

    async def _session(
        self, request: Request, frame: JsonRpcMessage
    ) -> tuple[GatewaySession, dict[str, str]]:
        """Return the session of a message, and headers for the response. `initialize` opens a session."""
        headers = request.headers
        if (session_id := headers.get(SESSION_HEADER)) is not None:
            return self._gateway.find(session_id), {}
        version = headers.get("mcp-protocol-version")
        if frame.method == "server/discover" or (version is not None and version not in HANDSHAKE_VERSIONS):
            message = (
                f"MCP revision {version or 'unknown'} has no sessions, but environments have state: use "
                f"revision {HANDSHAKE_VERSIONS[0]} or older"
            )
            refusal = GatewayError(400, "version", message, code=UNSUPPORTED_VERSION)
            refusal.data = {"supported": list(HANDSHAKE_VERSIONS), "requested": version or ""}
            raise refusal
        if frame.method != "initialize" or not frame.is_request:
            raise _no_session("start a session with an `initialize` request")
        session = await self._gateway.open(read_launch_request(headers, self._gateway.settings))
        return session, {SESSION_HEADER: session.id}

    async def _first_message(
        self, session: GatewaySession, channel: Channel, disconnected: asyncio.Task[None], *, is_first: bool
    ) -> bytes | None:
        """Return the first message on a channel, or None after a timeout or if the client has disconnected.

        End the session if this is its first request, and the environment does not reply in time.
        """
        seconds = self._gateway.settings.start_seconds if is_first else _PING_SECONDS
        receiver = asyncio.create_task(channel.get(seconds))
        await asyncio.wait({receiver, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not receiver.done():
            receiver.cancel()
            return None
        message = receiver.result()
        if message is None and is_first:
            end = session.environment.process.describe_end()
            reason = f"the environment did not reply within {seconds:g} s (`--start-seconds`)"
            session.end(f"{reason}; {end}" if end else reason)
            message = await channel.get(0)
        return message

    def _stream(self, request: Request) -> Response:
        session = self._find(request, "a stream needs a session")
        return _EventStream(session.listen(), b": open\r\n\r\n", session.stop_listening, {})

    def _delete(self, request: Request) -> Response:
        self._find(request, "name the session to end").end("closed by the client")
        return Response(status_code=204)

    def _find(self, request: Request, hint: str) -> GatewaySession:
        session_id = request.headers.get(SESSION_HEADER)
        if session_id is None:
            raise _no_session(hint)
        return self._gateway.find(session_id)


class _EventStream(StreamingResponse):
    """Stream of the event `first`, then the messages of a channel and pings.

    Calls `end` at the end, also if the client has disconnected before the first event.
    """

    def __init__(
        self, channel: Channel, first: bytes, end: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        events = _events(channel, first)
        super().__init__(events, media_type="text/event-stream", headers={**_SSE_HEADERS, **headers})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _events(channel: Channel, first: bytes) -> AsyncIterator[bytes]:
    yield first
    while not channel.finished:
        message = await channel.get(_PING_SECONDS)
        if message is not None:
            yield _event(message)
        elif not channel.closed:
            yield _PING


def _event(message: bytes) -> bytes:
    return b"event: message\r\ndata: " + message + b"\r\n\r\n"


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise GatewayError(413, "size", f"The message is larger than {MAX_BODY_BYTES // 2**20} MiB")
    return bytes(body)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error_reply(refusal: GatewayError, request_id: RequestId | None) -> Response:
    data = {"reason": refusal.reason, **refusal.data}
    return _json(error_response(request_id, refusal.code, str(refusal), data), status=refusal.status)


def _no_session(hint: str) -> GatewayError:
    return GatewayError(400, "session", f"The header `Mcp-Session-Id` is missing: {hint}")


def _json(content: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(content, status_code=status, media_type="application/json", headers=headers)
