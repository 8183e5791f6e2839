"""State of one rollout in the proxy: it enforces the rollout's limits, and calls the policy."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from buckeye.envs.base import CallOptions, Message, OptionsPolicy, Policy, Reply, TokenPolicy, Tool
from buckeye.errors import InferenceError, PromptTooLongError, UsageError
from buckeye.workers.proxy.endpoint import Limits, StopReason, Usage
from buckeye.workers.proxy.errors import WireError

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
ROLLOUT_ENDED = "This rollout has ended; its endpoint is closed."


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyCall:
    """A request for `n` replies to `messages`, or to `prompt` (text or token ids).

    `dropped` names the ignored settings.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[Tool] = ()
    prompt: str | Sequence[int] | None = None
    options: CallOptions
    n: int = 1
    dropped: Iterable[str] = ()


class ProxyRollout:
    """One rollout in the proxy. It calls `on_ignored_setting(name)` for every setting that it ignores."""

    def __init__(
        self,
        policy: Policy,
        *,
        model: str,
        limits: Limits,
        usage: Usage,
        on_ignored_setting: Callable[[str], None],
    ) -> None:
        self.id = secrets.token_hex(16)
        self.key = secrets.token_urlsafe(24)
        self.model = model
        self.usage = usage
        self.responses: dict[str, list[Message]] = {}
        """Conversations by the id of their last response, for `previous_response_id`."""
        self._policy = policy
        self._limits = limits
        self._deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
        self._on_ignored_setting = on_ignored_setting
        self._open: set[asyncio.Task[list[Reply]]] = set()
        self._open_turns = 0
        self._ended = False
        self._closed = False

    @property
    def seq_len(self) -> int | None:
        """Context length in tokens; None if the policy does not report it."""
        return self._policy.seq_len if isinstance(self._policy, TokenPolicy) else None

    def accepts_key(self, key: bytes) -> bool:
        """Return True if a request's key is the key of the rollout."""
        return hmac.compare_digest(key, self.key.encode())

    def token_text(self, token_id: int) -> str:
        """Return the text of a token. Raises AssertionError for a policy without tokens."""
        assert isinstance(self._policy, TokenPolicy)
        return self._policy.token_text(token_id)

    def start(self, call: PolicyCall) -> asyncio.Task[list[Reply]]:
        """Start a call of the policy, and return its task.

        A call that reaches a limit gets empty replies with finish reason "length". The task raises
        `WireError` if an earlier call has reached a limit, or if the policy cannot answer. This function
        itself raises `WireError` if the rollout is closed.
        """
        if self._closed:
            raise WireError(410, ROLLOUT_ENDED)
        self.usage.calls += 1
        task = asyncio.create_task(self._run_call(call))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    async def close(self) -> None:
        """Cancel every open call, and refuse all later calls."""
        self._closed = True
        open_calls = set(self._open)
        for task in open_calls:
            task.cancel()
        if open_calls:
            _, remaining = await asyncio.wait(open_calls, timeout=_CLOSE_SECONDS)
            if remaining:
                log.warning(
                    "%d policy calls are still open %g s after their rollout ended",
                    len(remaining),
                    _CLOSE_SECONDS,
                )

    async def _run_call(self, call: PolicyCall) -> list[Reply]:
        self._check_open()
        self._record_ignored(call.dropped)
        stop = self._reached_limit(call)
        if stop is not None:
            return self._end_with(stop, call)
        options = self._limit_options(call)
        turns = call.n if call.options.trained else 0
        self._open_turns += turns
        deadline = asyncio.timeout_at(self._loop_deadline())
        try:
            async with deadline:
                replies = await self._replies(call, options)
        except (PromptTooLongError, UsageError) as error:
            if isinstance(error, PromptTooLongError):
                self.usage.failure = str(error)
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
            raise WireError(400, str(error), code=code) from error
        except Exception as error:
            if deadline.expired():
                return self._end_with("timeout", call)
            is_inference_error = isinstance(error, InferenceError)
            self.usage.failure = str(error) if is_inference_error else f"{type(error).__name__}: {error}"
            if not is_inference_error:
                log.error("policy failed", exc_info=error)
            raise WireError(503, self.usage.failure) from error
        finally:
            self._open_turns -= turns
        return self._count(replies) if turns else replies

    def _check_open(self) -> None:
        if self.usage.failure is not None:
            raise WireError(503, f"The policy cannot reply: {self.usage.failure}")
        if self._ended:
            reason = self.usage.stop_reason
            raise WireError(400, f"The rollout has reached its limit: {reason}.", code="rollout_limit")

    def _reached_limit(self, call: PolicyCall) -> StopReason | None:
        usage, limits = self.usage, self._limits if call.options.trained else Limits()
        if limits.max_turns is not None and usage.turns + self._open_turns + call.n > limits.max_turns:
            return "max_turns"
        if limits.max_tokens is not None and usage.completion_tokens >= limits.max_tokens:
            return "max_tokens"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "timeout"
        return None

    def _end_with(self, stop: StopReason, call: PolicyCall) -> list[Reply]:
        self._ended = True
        self.usage.stop_reason = stop
        message = {"role": "assistant", "content": ""}
        return [Reply(text="", finish_reason="length", message=message)] * call.n

    def _limit_options(self, call: PolicyCall) -> CallOptions:
        if self._limits.max_tokens is None or not call.options.trained:
            return call.options
        remaining = max(1, (self._limits.max_tokens - self.usage.completion_tokens) // call.n)
        return replace(call.options, max_tokens=min(remaining, call.options.max_tokens or remaining))

    def _loop_deadline(self) -> float | None:
        if self._deadline is None:
            return None
        return asyncio.get_running_loop().time() + self._deadline - time.monotonic()

    async def _replies(self, call: PolicyCall, options: CallOptions) -> list[Reply]:
        if call.n == 1:
            return [await self._reply(call, options)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._reply(call, options)) for _ in range(call.n)]
        except ExceptionGroup as several:
            raise several.exceptions[0] from several
        return [task.result() for task in tasks]

    async def _reply(self, call: PolicyCall, options: CallOptions) -> Reply:
        policy = self._policy
        if call.prompt is not None:
            if not isinstance(policy, TokenPolicy):
                raise UsageError(
                    "this policy supports only chats", code="BK-INFERENCE-REQUEST", hint="use a chat route"
                )
            return await policy.complete(call.prompt, options=options)
        if isinstance(policy, OptionsPolicy):
            reply = await policy.ask(call.messages, tools=call.tools, options=options)
        else:
            self._record_ignored(name for name in ("max_tokens", "must_call") if getattr(call.options, name))
            reply = _cut_at_stop(await policy.chat(call.messages, tools=call.tools), options.stop)
        if options.logprobs and reply.tokens is None and reply.text_logprobs is None and not reply.no_room:
            self._record_ignored(["logprobs"])
        return reply

    def _count(self, replies: list[Reply]) -> list[Reply]:
        usage = self.usage
        sampled = [reply for reply in replies if not reply.no_room]
        if not sampled:
            if usage.stop_reason == "context":
                raise WireError(
                    400, "The conversation is longer than the context.", code="context_length_exceeded"
                )
            usage.stop_reason = "context"
            return replies
        if usage.stop_reason == "context":
            usage.stop_reason = None  # the agent continued with a shorter conversation
        usage.turns += len(sampled)
        usage.prompt_tokens += sum(reply.prompt_tokens for reply in sampled)
        usage.completion_tokens += sum(reply.completion_tokens for reply in sampled)
        max_tokens = self._limits.max_tokens
        cut = any(reply.finish_reason == "length" for reply in sampled)
        if max_tokens is not None and cut and usage.completion_tokens >= max_tokens:
            self._ended = True
            usage.stop_reason = "max_tokens"
        return replies

    def _record_ignored(self, settings: Iterable[str]) -> None:
        for setting in settings:
            self.usage.dropped[setting] += 1
            self._on_ignored_setting(setting)


def _cut_at_stop(reply: Reply, stops: tuple[str, ...]) -> Reply:
    """Return the reply, cut at the first stop text, for a policy that does not support stop texts."""
    matches = [(position, stop) for stop in stops if (position := reply.text.find(stop)) >= 0]
    if not matches or reply.message.get("tool_calls"):
        return reply
    position, stop = min(matches)
    text = reply.text[:position]
    message = {"role": "assistant", "content": text}
    return replace(reply, text=text, finish_reason="stop", message=message, stopped_by=stop)
