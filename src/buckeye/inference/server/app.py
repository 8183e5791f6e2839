"""HTTP application: routes, access control, and errors in OpenAI's format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from buckeye.base.request_gate import AccessRules, RequestGate
from buckeye.chat.openai_api import ChatRequest, CompletionRequest, error_body
from buckeye.errors import BuckeyeError, TransportError, UsageError
from buckeye.inference.server import admin, generate
from buckeye.inference.server.openapi import ApiRoute, openapi_document
from buckeye.inference.server.protocol import (
    AbortRequest,
    DetokenizeRequest,
    FinishUpdateRequest,
    LoadAdapterRequest,
    RpcRequest,
    TokenizeRequest,
    TurnRequest,
    UnloadAdapterRequest,
    UpdateRequest,
    WeightVersionRequest,
)
from buckeye.inference.server.responses import json_response
from buckeye.inference.server.service import Service

log = logging.getLogger(__name__)


def create_app(service: Service, rules: AccessRules) -> ASGIApp:
    """Return the ASGI application with all routes of `service`. It refuses requests that break `rules`."""
    endpoints = _endpoints()
    routes = [
        Route(
            endpoint.path.replace("{model}", "{model:path}"),  # model names may contain slashes
            partial(endpoint.handler, service),
            methods=[endpoint.method],
        )
        for endpoint in endpoints
    ]
    openapi = json_response(openapi_document(endpoints))
    app = Starlette(
        routes=[*routes, Route("/openapi.json", lambda _: openapi, methods=["GET"])],
        exception_handlers={
            BuckeyeError: _on_buckeye_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_any_error,
        },
    )
    app.router.redirect_slashes = False
    return RequestGate(app, rules)  # type: ignore[arg-type,return-value]


def _endpoints() -> list[ApiRoute]:
    weights, adapters = admin.WeightUpdate(), admin.AdapterRoutes()
    return [
        ApiRoute("GET", "/health", admin.health),
        ApiRoute("GET", "/metrics", admin.metrics),
        ApiRoute("GET", "/v1/models", admin.models),
        ApiRoute("GET", "/v1/models/{model}", admin.model),
        ApiRoute("POST", "/v1/chat/completions", generate.chat_completions, ChatRequest),
        ApiRoute("POST", "/v1/completions", generate.completions, CompletionRequest),
        ApiRoute("POST", "/inference/v1/generate", generate.generate, TurnRequest),
        ApiRoute("POST", "/tokenize", generate.tokenize, TokenizeRequest),
        ApiRoute("POST", "/detokenize", generate.detokenize, DetokenizeRequest),
        ApiRoute("GET", "/is_paused", admin.is_paused),
        ApiRoute("POST", "/pause", admin.pause, query=admin.PAUSE_QUERY),
        ApiRoute("POST", "/resume", admin.resume),
        ApiRoute("POST", "/sleep", admin.sleep, query=admin.SLEEP_QUERY),
        ApiRoute("POST", "/release_kv_cache_memory", admin.release_kv_cache_memory),
        ApiRoute("POST", "/wake_up", admin.wake_up, query=admin.WAKE_QUERY),
        ApiRoute("GET", "/is_sleeping", admin.is_sleeping),
        ApiRoute("POST", "/abort_requests", admin.abort_requests, AbortRequest),
        ApiRoute("GET", "/weight_info", admin.weight_info),
        ApiRoute("POST", "/update_weight_version", admin.update_weight_version, WeightVersionRequest),
        ApiRoute("POST", "/start_weight_update", weights.start),
        ApiRoute("POST", "/update_weights", weights.update, UpdateRequest),
        ApiRoute("POST", "/finish_weight_update", weights.finish, FinishUpdateRequest),
        ApiRoute("POST", "/collective_rpc", weights.rpc, RpcRequest),
        ApiRoute("POST", "/v1/load_lora_adapter", adapters.load, LoadAdapterRequest),
        ApiRoute("POST", "/v1/unload_lora_adapter", adapters.unload, UnloadAdapterRequest),
    ]


def _error_response(
    status_code: int, message: str, headers: Mapping[str, str] | None = None, *, code: str | None = None
) -> Response:
    return json_response(error_body(message, status_code, code=code), status_code, headers)


async def _on_buckeye_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BuckeyeError)
    status_code = 400 if isinstance(error, UsageError | TransportError) else 500
    return _error_response(status_code, str(error), code=error.code)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error_response(error.status_code, error.detail, error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # not sent, because the client is disconnected


async def _on_any_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _error_response(500, "internal error: see the log of the server", code="BK-UNEXPECTED")
