"""The HTTP requests that the inference server takes beside those for tokens, typed; the names are vLLM's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from buckeye.chat.messages import ChatMessage
from buckeye.chat.openai_api import TokenIds, Tools, check_conversation, error_content
from buckeye.errors import InferenceError

# HTTP responses: JSON, errors in OpenAI's form, server-sent events.


def json_response(content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(content), status_code, headers, "application/json")


class EventStream(Response):
    """Server-sent events, ended by `[DONE]`. The submission inside the iterator notices a client that
    leaves."""

    def __init__(self, events: AsyncGenerator[Any, None]) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come; an error of the engine is one of them, and the last."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await _send_event(send, msgspec.json.encode(event))
        except ClientDisconnect:
            return
        except InferenceError as error:
            await _send_event(send, msgspec.json.encode(error_content(str(error), 500)))
        await _send_event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


# The HTTP requests that the inference server takes beside those for tokens, typed; the names are vLLM's.


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text as `prompt`, or `messages` as the chat template writes them."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None
    model: str | None = None
    add_special_tokens: bool = True
    """Of a `prompt`; messages have those that the chat template writes."""
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        if self.messages is not None:
            check_conversation(self.messages, self.tools)
        elif self.tools:
            raise ValueError("`tools` go with `messages`")


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None


class UpdateInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where the new weights lie: a published weights directory."""

    path: str


class UpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weights."""

    update_info: UpdateInfo


class FinishUpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /finish_weight_update."""

    weight_version: str | int | None = None


class WeightVersionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weight_version."""

    new_version: str | int


class InitTransferRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /init_weight_transfer_engine. Weights that come as files need nothing agreed on before."""

    init_info: dict[str, Any] = {}


class RpcRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /collective_rpc."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_requests; no ids means all."""

    request_ids: list[str] | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter: a directory in peft's format, and the name that requests give as their
    model. `load_inplace` lets it take the place of one of the same name."""

    lora_name: Annotated[str, Meta(min_length=1)]
    lora_path: Annotated[str, Meta(min_length=1)]
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
