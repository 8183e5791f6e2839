"""The HTTP application: routes, the key, the size limit, and errors in OpenAI's form."""

from __future__ import annotations

import hmac
import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from buckeye.errors import BuckeyeError, TransportError, UsageError
from buckeye.inference import admin, completions
from buckeye.inference.responses import error_content, json_response
from buckeye.inference.service import Service

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20


def create_app(service: Service, *, api_key: str | None) -> ASGIApp:
    """The application that serves `service`. With a key, every route but /health asks for it."""
    update = admin.WeightUpdate()
    get = {
        "/health": admin.health,
        "/v1/models": admin.models,
        "/metrics": admin.metrics,
        "/weight_info": admin.weight_info,
        "/is_paused": admin.is_paused,
    }
    post = {
        "/inference/v1/generate": completions.generate,
        "/v1/completions": completions.completions,
        "/v1/chat/completions": completions.chat_completions,
        "/pause": admin.pause,
        "/resume": admin.resume,
        "/init_weight_transfer_engine": admin.init_weight_transfer,
        "/start_weight_update": update.start,
        "/update_weights": update.update,
        "/finish_weight_update": update.finish,
        "/collective_rpc": update.rpc,
        "/reset_prefix_cache": admin.reset_prefix_cache,
        "/abort_requests": admin.abort_requests,
    }
    app = Starlette(
        routes=[
            *(Route(path, handler, methods=["GET"]) for path, handler in get.items()),
            *(Route(path, handler, methods=["POST"]) for path, handler in post.items()),
        ],
        exception_handlers={
            BuckeyeError: _on_buckeye_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_any_error,
        },
    )
    app.state.service = service
    return _Gate(app, api_key)


class _Gate:
    """In front of everything: 401 without the key, 413 for a body over the limit."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        if self._expected is not None and scope["path"] != "/health":
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await _refuse(401, "This server asks for its API key: send `Authorization: Bearer <key>`.")(
                    scope, receive, send
                )
                return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            await _refuse(413, _TOO_LARGE)(scope, receive, send)
            return
        await self._app(scope, _limited(receive), send)


_TOO_LARGE = f"The body is larger than {MAX_BODY_BYTES} bytes."


def _limited(receive: Receive) -> Receive:
    """`receive` that raises 413 once a body without a declared length has grown too large."""
    total = 0

    async def limited() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > MAX_BODY_BYTES:
            raise HTTPException(413, _TOO_LARGE)
        return message

    return limited


def _refuse(status_code: int, message: str) -> Response:
    return json_response(error_content(message, status_code), status_code)


async def _on_buckeye_error(request: Request, error: Exception) -> Response:
    if isinstance(error, UsageError | TransportError):
        return _refuse(400, str(error))
    return json_response(error_content(str(error), 500, "internal_error"), 500)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refuse(error.status_code, error.detail)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_any_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return json_response(error_content("The server failed; see its log.", 500, "internal_error"), 500)
