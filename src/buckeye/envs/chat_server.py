"""Client for the server of a model, which speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import copy
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import httpx
import msgspec

from buckeye.base.storage import well_formed
from buckeye.envs.base import join_text_parts
from buckeye.errors import InferenceError
from buckeye.monitor.redact import redact

_RETRIED_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_MAX_WAIT = 60.0
_CONNECT_ATTEMPTS = 5
"""Maximum number of attempts, over about eight seconds, if the server has never responded."""
_CONTEXT_EXCEEDED = re.compile(
    r"context[_ ]length|maximum context|the context is|max_model_len|prompt is too long|too many tokens", re.I
)
_NO_CREDIT = "insufficient_quota"
"""Code of OpenAI's API for an account without credit. Its status is 429, as of a busy server."""


@dataclass(slots=True)
class ChatServer:
    """Client for the server of a model. `base_url` ends in /v1.

    `refusal` is the reason why all requests will fail: a wrong key, an unknown model or route, or no server.
    `on_retry` receives the reason before each retry.
    """

    base_url: str
    model: str
    client: httpx.AsyncClient
    on_retry: Callable[[str], None] = lambda text: None
    refusal: InferenceError | None = None
    has_responded: bool = False

    async def context_length(self) -> int:
        """Return the number of tokens of prompt and reply that a server of Buckeye or vLLM accepts."""
        response = await self.client.get(f"{self.base_url}/models")
        return int(response.raise_for_status().json()["data"][0]["max_model_len"])

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the response to one chat completion; None if the conversation is too long for the model.

        Retry for about a minute if the server is busy or unreachable. Raise `InferenceError`.
        """
        url = f"{self.base_url}/chat/completions"
        for attempt, wait in enumerate((*_WAITS, None), start=1):
            if self.refusal is not None:
                raise copy.copy(self.refusal)  # a copy, because each raise adds a traceback
            retry_after = 0.0
            try:
                response = await self.client.post(url, json={"model": self.model, **body})
            except httpx.TransportError as error:
                problem = InferenceError(
                    f"{url} did not reply: {str(error) or type(error).__name__}",
                    code="BK-INFERENCE-UNREACHABLE",
                    hint="check the address, and that the server is running",
                )
                if (
                    isinstance(error, httpx.ConnectError)
                    and not self.has_responded
                    and attempt >= _CONNECT_ATTEMPTS
                ):
                    self.refusal = problem
                    continue
            else:
                self.has_responded = True
                if response.status_code == 200:
                    return _chat_completion(url, response)
                if response.status_code in (400, 413, 422) and _CONTEXT_EXCEEDED.search(response.text):
                    return None
                problem = _status_error(url, response)
                if response.status_code in (401, 403, 404):
                    self.refusal = problem
                if response.status_code not in _RETRIED_STATUSES or _NO_CREDIT in response.text:
                    raise problem
                retry_after = _retry_after(response)
            if wait is None:
                break
            self.on_retry(f"{problem.message}; retrying")
            await asyncio.sleep(min(_MAX_WAIT, max(retry_after, wait * random.uniform(0.75, 1.25))))  # noqa: S311  not for security
        message = f"{problem.message} ({len(_WAITS) + 1} attempts)"
        raise InferenceError(message, code=problem.code, at=problem.at, hint=problem.hint)


def _chat_completion(url: str, response: httpx.Response) -> dict[str, Any]:
    """Return a response with the content of each message as one text, and only valid numbers in `usage`."""
    try:
        value: dict[str, Any] = well_formed(response.json())
        msgspec.convert(value, _ChatCompletion)
    except (ValueError, RecursionError) as error:  # msgspec names the field
        raise InferenceError(
            f"{url} did not reply with a chat completion: {error}: {_shorten(response.text)}",
            code="BK-INFERENCE-REPLY",
        ) from None
    for choice in value["choices"]:
        choice["message"] = join_text_parts(choice["message"])
    usage = value.get("usage")
    counts = usage.items() if isinstance(usage, dict) else ()
    value["usage"] = {name: count for name, count in counts if isinstance(count, int) and count >= 0}
    return value


class _Function(msgspec.Struct):
    name: str


class _Call(msgspec.Struct):
    function: _Function


class _TextPart(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class _Message(msgspec.Struct):
    content: str | list[_TextPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _ChatCompletion(msgspec.Struct):
    """The fields of a response that Buckeye reads."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


def _status_error(url: str, response: httpx.Response) -> InferenceError:
    status, hint = response.status_code, None
    code = "BK-INFERENCE-REPLY" if status >= 500 else "BK-INFERENCE-REQUEST"
    if status in (401, 403):
        code, hint = "BK-KEY-INVALID", "check the key of the server, and the variable that holds it"
    elif status == 402 or _NO_CREDIT in response.text:
        hint = "check the balance of the account"
    elif status in (404, 405) or status < 400:
        hint = "check the address (it ends in /v1) and the name of the model"
    return InferenceError(f"{url} replied with {status}: {_shorten(response.text)}", code=code, hint=hint)


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # a date
        return 0.0


def _shorten(text: str) -> str:
    return str(redact(" ".join(text.split())[:300]))
