"""HTTP server for the page and its API. The server only reads runs."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from buckeye.base.columns import counted
from buckeye.base.http_server import http_server, listen
from buckeye.base.keys import generated_key
from buckeye.base.request_gate import AccessRules, Denial, RequestGate, is_loopback
from buckeye.errors import BuckeyeError, PortTakenError, UsageError
from buckeye.ui import STATIC, findings
from buckeye.ui.endpoints import call_endpoint, summary
from buckeye.ui.run_catalog import OpenRun, RunCatalog

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_KEY = "BUCKEYE_UI_KEY"
_POLL_SECONDS = 1.0
_SILENCE_SECONDS = 15.0
_MOST_LISTENERS = 64
_SLOW = ("findings",)  # answered in separate threads, so that other requests do not wait for them


def serve(
    sources: RunCatalog, *, host: str, port: int | None, usual_port: int, tell: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT, and pass the address to `tell`.

    If `port` is None, use `usual_port`, or a free port if `usual_port` is taken. Raise `PortTakenError` if
    `port` is taken.
    """
    try:
        listener = listen(host, usual_port if port is None else port, change="Choose a --port.")
    except PortTakenError:
        if port is not None:
            raise
        listener = listen(host, 0, change="Choose a --port.")
    at = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    with contextlib.ExitStack() as stack:
        key = None if is_loopback(host) else stack.enter_context(generated_key(_KEY, at))
        tell(f"http://{shown}:{at}/{f'#key={key}' if key else ''}")
        tell(f"{counted(len(sources.all()), 'run')}. Ctrl-C stops this server, but no run.")
        asyncio.run(_serve(create_app(sources, host=host, key=key), listener))


async def _serve(app: Any, listener: socket.socket) -> None:
    server = http_server(app, timeout_graceful_shutdown=1)
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loop.run_in_executor(None, importlib.import_module, "buckeye.runs.status")  # preload: the import is slow
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    server.should_exit = True
    findings.stop()
    await serving


def create_app(sources: RunCatalog, *, host: str = "127.0.0.1", key: str | None = None) -> Starlette:
    """Return the application. The page needs no key. The API, which has the data of runs, needs `key`."""
    served = _ApiRoutes(sources)
    rules = AccessRules(host=host, key=key, key_hint="open the address that `buckeye ui` has printed")
    api = Starlette(
        routes=[
            Route("/runs", served.runs),
            Route("/runs/{run}/{endpoint}", served.endpoint),
            Route("/live", served.live),
        ],
        exception_handlers=_ON_ERROR,
    )
    return Starlette(
        routes=[
            Route("/", _page),
            Mount("/api", RequestGate(api, rules, _refusal)),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[
            Middleware(_Headers),
            Middleware(RequestGate, rules=AccessRules(host=host, key=None), body=_refusal),
        ],
        exception_handlers=_ON_ERROR,
    )


class _Headers:
    """ASGI middleware that adds the security headers to every response."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        await self._app(scope, receive, marked)


def _refusal(why: Denial) -> bytes:
    return msgspec.json.encode({"error": why.message})


def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code)
    return JSONResponse({"error": str(error)}, 404 if isinstance(error, UsageError) else 500)


_ON_ERROR: Mapping[Any, Callable[[Request, Exception], Response | Awaitable[Response]]] = {
    BuckeyeError: _error_response,
    HTTPException: _error_response,
}


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class _ApiRoutes:
    """Routes of the API."""

    def __init__(self, sources: RunCatalog) -> None:
        self._sources = sources
        self._listeners = 0
        self._slow = ThreadPoolExecutor(_MOST_LISTENERS)

    async def runs(self, request: Request) -> Response:
        """Handle GET /runs: all runs, newest first. If the user asked for one run, `only` is its name."""

        def listed() -> list[dict[str, Any]]:
            found = [summary(run) for run in self._sources.all()]
            return sorted(found, key=lambda entry: entry["started"] or 0.0, reverse=True)

        return _json({"runs": await run_in_threadpool(listed), "only": self._sources.only})

    async def endpoint(self, request: Request) -> Response:
        """Handle GET /runs/RUN/ENDPOINT by calling the function in `ENDPOINTS`."""
        run, endpoint = request.path_params["run"], request.path_params["endpoint"]

        def answered() -> Any:
            return call_endpoint(self._sources.find(run), endpoint, request.query_params)

        if endpoint not in _SLOW:
            return _json(await run_in_threadpool(answered))
        return _json(await asyncio.get_running_loop().run_in_executor(self._slow, answered))

    async def live(self, request: Request) -> Response:
        """Handle GET /live[?run=RUN]: server-sent events.

        Whenever the run has new data, send an event `changed` with the run's stamp.
        """
        name = request.query_params.get("run")
        run = None if name is None else await run_in_threadpool(self._sources.find, name)
        if self._listeners >= _MOST_LISTENERS:
            raise HTTPException(503, f"{_MOST_LISTENERS} pages are open already.")
        return StreamingResponse(self._events(run), media_type="text/event-stream")

    async def _events(self, run: OpenRun | None) -> AsyncIterator[bytes]:
        self._listeners += 1
        loop, seen = asyncio.get_running_loop(), None
        sent_at = loop.time()
        try:
            yield b": hello\n\n"
            while True:
                stamp = None if run is None else await run_in_threadpool(run.stamp)
                if stamp != seen:
                    seen, sent_at = stamp, loop.time()
                    yield b"event: changed\ndata: " + msgspec.json.encode(stamp) + b"\n\n"
                await asyncio.sleep(_POLL_SECONDS)
                if loop.time() - sent_at > _SILENCE_SECONDS:
                    sent_at = loop.time()
                    yield b": still here\n\n"
        finally:
            self._listeners -= 1
