"""Interface of environments: the methods that an author implements, and the policy that they call.

An environment has tasks and runs rollouts of a task with a policy. It never sees tokens: `Policy.chat`
records token ids, log-probs, masks and policy versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from buckeye.envs.stdlib_only.outcomes import Boundary, check_reward
from buckeye.errors import UsageError

Message = Mapping[str, Any]
"""Chat message in OpenAI's format: `role`, `content`, and optionally `tool_calls` or `tool_call_id`."""

Tool = Mapping[str, Any]
"""Tool in OpenAI's format: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


def join_text_parts(message: Message) -> Message:
    """Return the message with its text parts (`[{"type": "text", "text": "..."}]`) joined into one text.

    A message with other parts is returned unchanged (see `find_non_text_part`).
    """
    if not _has_parts(message) or find_non_text_part(message["content"]) is not None:
        return message
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def _has_parts(message: Message) -> bool:
    return isinstance(message.get("content"), list | tuple)


def find_non_text_part(content: Sequence[Any]) -> tuple[int, str] | None:
    """Return position (from 1) and type of the first part that is not text; None if all parts are text."""
    for number, part in enumerate(content, start=1):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            return number, str(kind)
        if not isinstance(part.get("text"), str):
            return number, "without a `text`"
    return None


START = "start"
"""Key in a task's data for an initial state that the prompt does not describe. Two tasks with different
values are different, even with equal prompts.
"""

ROLLOUT_DEADLINE: ContextVar[float] = ContextVar("ROLLOUT_DEADLINE", default=math.inf)
"""Deadline of the current rollout on the monotonic clock; exceeding it is an error. An environment that stops
earlier can still score the progress.
"""

FinishReason = Literal["stop", "length"]
"""End of a reply: complete, or truncated at a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem of an environment. `data` belongs to the environment and may hold the accepted answers."""

    id: str
    messages: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(isinstance(message, Mapping) and _has_parts(message) for message in self.messages):
            object.__setattr__(self, "messages", tuple(map(join_text_parts, self.messages)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Reply of the policy in one turn. `text` is its complete sampled text.

    `message` can be appended to the conversation unchanged. It has `content`, `reasoning_content` if the chat
    template separates reasoning, and `tool_calls` if tools were offered and called. An unreadable call has
    the name "" and the original text as its arguments.
    """

    text: str
    finish_reason: FinishReason
    message: Message
    prompt_tokens: int = 0
    """Number of prompt tokens; 0 if the policy does not count them."""
    completion_tokens: int = 0
    """Number of reply tokens; 0 if the policy does not count them."""
    no_room: bool = False
    """True if nothing was sampled because the conversation fills the context."""
    stopped_by: str | None = None
    """Text of `CallOptions.stop` that ended the reply."""
    tokens: ReplyTokens | None = None
    """Tokens of the reply, if available."""
    text_logprobs: Sequence[tuple[str, float]] | None = None
    """Text and log-prob of each token, for a policy without token ids. None if not requested or not returned.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyTokens:
    """Sampled tokens of a reply: `token_ids` and `logprobs` are aligned and include the final token."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """Options of one call: limits and form of the reply.

    The caller cannot set sampling parameters such as the temperature.
    """

    max_tokens: int | None = None
    """Maximum number of tokens, within the policy's own limit."""
    stop: tuple[str, ...] = ()
    """The reply ends before the first of these texts."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the reply, in addition to the end tokens of the model."""
    must_call: bool = False
    """True if the reply must be a tool call."""
    tool: str | None = None
    """Tool that must be called; None leaves the choice to the model."""
    logprobs: bool = False
    """True if the caller needs the log-probs of the reply."""
    trained: bool = True
    """True if the reply is recorded as part of the rollout.

    If false, the reply is not trained and does not count toward the limits on turns and tokens. Example:
    the reply of an opponent.
    """


DEFAULT_OPTIONS = CallOptions()
"""Default options of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of one rollout.

    An errored rollout has an `error` and no `reward`: it is never scored 0. `components` are logged but not
    rewarded. `stop_reason` is a short text such as "answered" or "truncated". The optional `turn_rewards`
    have one entry per call of `Policy.chat` and add up to `reward`. `boundary` is the part of the rollout
    that failed. Failures of the boundary "task" are not retried, because the task is invalid. One of the
    boundary "config" ends a run whose environment has not worked yet, because no task can run.

    `pending` is the id of a rollout of a `GroupEnvironment` that gets its reward when its group is
    finished. `explanations` maps names of components to their reasons as text. `trace` has the frames of an
    error, outermost first. The caller of the environment sets `trace`.
    """

    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = "done"
    error: str | None = None
    turn_rewards: Sequence[float] | None = None
    boundary: Boundary | None = None
    pending: str | None = None
    explanations: Mapping[str, str] = field(default_factory=dict)
    trace: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.error is None and self.pending is None:
            check_reward(self.reward)  # here, so that the traceback has the author's line
        elif sum(value is not None for value in (self.reward, self.error, self.pending)) != 1:
            raise ValueError("an Outcome has either a reward or an error")
        if self.reward is None or self.turn_rewards is None:
            return
        total = math.fsum(self.turn_rewards)
        if not math.isclose(total, self.reward, rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError(f"turn_rewards add up to {total:g}, but the reward is {self.reward:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Reply with a known reward: grading `reply` to `task` must return between `low` and `high`.

    Equal bounds mean an exact score. `buckeye env check` runs the probes of an environment's optional method
    `probes() -> Sequence[Probe]`. In a multi-turn environment `reply` is the reply of every turn.
    """

    name: str
    task: Task
    reply: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"probe {self.name!r}: low ({self.low:g}) must not exceed high ({self.high:g})")


class Policy(Protocol):
    """Model being trained, as seen by an environment. One instance serves one rollout."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Sample the next assistant message. Raise `InferenceError` if no engine can reply."""
        ...


@runtime_checkable
class OptionsPolicy(Protocol):
    """Policy with a method `ask` that accepts options. Other policies have only `chat`, without options."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Sample the next assistant message without options.

        Raise `InferenceError` if no engine can reply.
        """
        return await self.ask(messages, tools=tools)

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Reply:
        """Sample the next assistant message with options.

        Raise `InferenceError` if no engine can reply, `UsageError` for options or messages that the model
        does not support.
        """
        ...


@runtime_checkable
class ToolAwarePolicy(Protocol):
    """Policy that needs a list of the callable tools, such as a human policy.

    If the prompt describes the tools as text, `chat` does not get this list.
    """

    def set_tools(self, tools: Sequence[Tool], form: str) -> None:
        """Set the callable tools.

        `form` is the text of a reply, with `{call}` in place of a call `name(argument=value, ...)`.
        """
        ...


@runtime_checkable
class TokenPolicy(Protocol):
    """Policy that can also continue a text or token ids, and returns the tokens of its replies."""

    seq_len: int
    """Maximum number of tokens of a prompt and its reply together."""

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Reply:
        """Sample the continuation of a text, or of token ids.

        Raise `InferenceError` if no engine can reply, `UsageError` for unsupported options.
        """
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of one token."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Environment of a policy: its tasks, and the rollouts on them."""

    name: str

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, in a fixed order; they may be generated lazily.

        Raise `KeyError` for an unknown split.
        """
        ...

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Run one rollout. Called concurrently; must keep no state between calls."""
        ...


@runtime_checkable
class GroupEnvironment(Environment, Protocol):
    """Environment with rewards that depend on the other rollouts of a task."""

    async def rollout_in_group(self, task: Task, policy: Policy) -> Outcome:
        """Run one rollout and leave it `pending`, unless it failed."""
        ...

    async def finish_group(self, task: Task, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Return the outcomes of one task with their rewards, in the given order.

        Errored outcomes stay unchanged.
        """
        ...


# Splits of an environment's tasks.

TRAIN = "train"


def split_names(environment: Environment) -> tuple[str, ...]:
    """Return the `splits` of an environment. Default: `train` and `eval`, if they have tasks.

    Raise `UsageError` if it has none.
    """
    listed: Sequence[str] | None = getattr(environment, "splits", None)
    if listed is not None:
        return tuple(listed)
    found = tuple(name for name in (TRAIN, "eval") if _has_tasks(environment, name))
    if not found:
        raise UsageError(
            f"environment {environment.name} has neither a `train` nor an `eval` split",
            code="BK-ENV-TASKS",
            hint="add one of them, or list the names of its splits in a member `splits`",
        )
    return found


def _has_tasks(environment: Environment, name: str) -> bool:
    try:
        return len(environment.tasks(name)) > 0
    except KeyError:
        return False
