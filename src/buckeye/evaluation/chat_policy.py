"""Policy behind the OpenAI chat API: text or native tool calls, without token ids."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from buckeye.base.storage import well_formed
from buckeye.envs.base import (
    DEFAULT_OPTIONS,
    CallOptions,
    FinishReason,
    Message,
    OptionsPolicy,
    Reply,
    Tool,
    join_text_parts,
)
from buckeye.errors import InferenceError, PromptTooLongError
from buckeye.evaluation.tool_names import ToolNames
from buckeye.monitor.redact import redact
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.rollout_runner import RolloutRunner
from buckeye.orchestrator.training_samples import Segment

_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_LONGEST_WAIT = 60.0
_UNHEARD = 5
"""Attempts at an address that has never responded, over about eight seconds."""
_TOO_LONG = re.compile(
    r"context[_ ]length|maximum context|the context is|max_model_len|prompt is too long|too many tokens", re.I
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSampling:
    """Sampling settings of a chat request; None: the server's default."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None

    def with_seed(self, seed: int) -> ChatSampling:
        """Return a copy with another seed; unchanged if no seed is set."""
        return self if self.seed is None else replace(self, seed=seed)

    def body(self, turn: int) -> dict[str, Any]:
        """Return the sampling fields of a request. Each turn has a different seed."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        given["seed"] = None if self.seed is None else (self.seed + turn) % 2**31
        return {name: value for name, value in given.items() if value is not None}


@dataclass(slots=True)
class ChatServer:
    """Server of a model; `base_url` ends in /v1.

    `refusal` is the reason why all requests will fail: a wrong key, an unknown model or route, or no server.
    `tell` is called with the reason for each wait.
    """

    base_url: str
    model: str
    client: httpx.AsyncClient
    tell: Callable[[str], None] = lambda text: None
    refusal: str | None = None
    has_responded: bool = False

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the response to one chat completion; None if the conversation is too long for the model.

        Retry for about a minute if the server is busy or unreachable. Raise `InferenceError`.
        """
        url = f"{self.base_url}/chat/completions"
        problem = ""
        for attempt, wait in enumerate((*_WAITS, None), start=1):
            if self.refusal is not None:
                raise InferenceError(self.refusal)
            asked = 0.0
            try:
                answer = await self.client.post(url, json={"model": self.model, **body})
            except httpx.TransportError as error:
                problem = f"{url} did not answer: {str(error) or type(error).__name__}"
                if isinstance(error, httpx.ConnectError) and not self.has_responded and attempt >= _UNHEARD:
                    self.refusal = problem
                    continue
            else:
                self.has_responded = True
                if answer.status_code == 200:
                    return _json(url, answer)
                problem = f"{url} answered {answer.status_code}: {_short(answer.text)}"
                if answer.status_code in (400, 413, 422) and _TOO_LONG.search(answer.text):
                    return None
                if answer.status_code in (401, 403, 404):
                    self.refusal = problem
                if answer.status_code not in _AGAIN:
                    raise InferenceError(problem)
                asked = _retry_after(answer)
            if wait is None:
                break
            self.tell(f"{problem}; asking again")
            await asyncio.sleep(min(_LONGEST_WAIT, max(asked, wait * random.uniform(0.75, 1.25))))  # noqa: S311  not for security
        raise InferenceError(f"{problem} (asked {len(_WAITS) + 1} times)")


@dataclass(slots=True)
class ChatPolicy(OptionsPolicy):
    """`Policy` for one rollout. `messages` is the conversation after its last turn."""

    server: ChatServer
    sampling: ChatSampling
    messages: Sequence[Message] = ()
    turns: int = 0
    turns_without_room: int = 0
    was_cut: bool = False
    finish_reason: FinishReason = "stop"
    sampling_seconds: float = 0.0
    replies: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    segments: tuple[Segment, ...] = ()
    """Always empty: tokens are not recorded."""
    turns_extended: int = 0
    turns_branched: int = 0

    @property
    def temperature(self) -> float:
        """Sampling temperature; 1 if the server chooses it."""
        return 1.0 if self.sampling.temperature is None else self.sampling.temperature

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Reply:
        """Sample the next message; the options go to the server.

        A conversation that has become too long gets an empty reply with finish reason "length". Raise
        `InferenceError` if the server fails, or, as `PromptTooLongError`, if the first prompt is too long.
        """
        messages = [join_text_parts(message) for message in messages]
        names = ToolNames(tools, messages)
        sent = [names.to_server_message(_sent(message)) for message in messages]
        body: dict[str, Any] = {"messages": sent, **self.sampling.body(self.turns)}
        body |= _option_fields(options, body.get("max_tokens"), names)
        if tools:
            body["tools"] = names.to_server_tools(tools)
        started = time.monotonic()
        try:
            answer = await self.server.complete(body)
        except InferenceError as error:
            raise InferenceError(names.explain_error(str(error))) from None
        finally:
            self.sampling_seconds += time.monotonic() - started
        if answer is None:
            return self._no_room(messages, options)
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        reply = replace(
            _reply({**choice, "message": names.from_server_message(choice["message"])}),
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
        )
        if options.trained:
            self.turns += 1
            self.prompt_tokens += reply.prompt_tokens
            self.completion_tokens += reply.completion_tokens
            self.finish_reason = reply.finish_reason
            self.replies.append(reply.text)
            self.messages = [*messages, reply.message]
        return reply

    def _no_room(self, messages: Sequence[Message], options: CallOptions) -> Reply:
        if self.turns == 0:
            raise PromptTooLongError("the prompt is longer than the model's context")
        if options.trained:
            self.finish_reason = "length"
            self.turns_without_room += 1
            self.messages = list(messages)
        message = {"role": "assistant", "content": ""}
        return Reply(text="", finish_reason="length", message=message, no_room=True)


class ChatRolloutRunner(RolloutRunner):
    """Rollout runner for a model behind the chat API."""

    def __init__(
        self,
        server: ChatServer,
        sampling: ChatSampling,
        *,
        seed: int,
        timeout: float,
        retries: int,
        max_concurrent: int,
    ) -> None:
        def make_policy(env: NamedEnvironment, seed: int) -> ChatPolicy:
            return ChatPolicy(server, sampling.with_seed(seed % 2**31))

        super().__init__(
            lambda flight: make_policy,
            seed=seed,
            timeout=timeout,
            retries=retries,
            max_concurrent=max_concurrent,
        )
        self.server = server


def _option_fields(options: CallOptions, max_tokens: int | None, names: ToolNames) -> dict[str, Any]:
    """Return the request fields of the options; `max_tokens` is the limit set elsewhere."""
    fields: dict[str, Any] = {}
    if options.max_tokens is not None:
        fields["max_tokens"] = min(options.max_tokens, max_tokens or options.max_tokens)
    if options.stop:
        fields["stop"] = list(options.stop)
    if options.stop_token_ids:
        fields["stop_token_ids"] = list(options.stop_token_ids)
    if options.must_call:
        tool = None if options.tool is None else names.to_server_name(options.tool)
        named = {"type": "function", "function": {"name": tool}}
        fields["tool_choice"] = "required" if tool is None else named
    if options.logprobs:
        fields["logprobs"] = True
    return fields


def _reply(choice: Mapping[str, Any]) -> Reply:
    message = choice["message"]
    content = message.get("content") or ""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    kept: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        kept["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return Reply(
        text=f"<think>{reasoning}</think>{content}" if reasoning else content,
        finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        message=kept,
        text_logprobs=_logprobs(choice),
    )


def _logprobs(choice: Mapping[str, Any]) -> list[tuple[str, float]] | None:
    """Return the tokens of a choice with their log-probs; None if the server sends no valid ones."""
    try:
        return [(str(one["token"]), float(one["logprob"])) for one in choice["logprobs"]["content"]]
    except (LookupError, TypeError, ValueError):
        return None


def _sent(message: Message) -> dict[str, Any]:
    """Return the message in the form that servers accept, without earlier reasoning."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _json(url: str, answer: httpx.Response) -> dict[str, Any]:
    try:
        value = well_formed(answer.json())
        if isinstance(value["choices"][0]["message"], dict):
            return value  # type: ignore[no-any-return]
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise InferenceError(f"{url} answered with no chat completion: {_short(answer.text)}")


def _retry_after(answer: httpx.Response) -> float:
    try:
        return max(0.0, float(answer.headers.get("retry-after", "0")))
    except ValueError:  # a date
        return 0.0


def _short(text: str) -> str:
    return str(redact(" ".join(text.split())[:300]))
