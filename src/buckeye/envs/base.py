"""Interface of environments: the methods that an author implements, and the policy that these methods call.

An environment has tasks, and runs a rollout of a task with a policy. An environment does not handle tokens,
because `Policy.chat` records token ids, log-probs, masks and policy versions.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from buckeye.base.distribution import CODE_FOLDER
from buckeye.envs.stdlib_only.outcomes import Boundary, check_reward, frames_of, location_of
from buckeye.errors import THIRD_PARTY_ERRORS, BuckeyeError, UsageError

Message = Mapping[str, Any]
"""Chat message in OpenAI's format: `role`, `content`, and optionally `tool_calls` or `tool_call_id`."""

Tool = Mapping[str, Any]
"""Tool in OpenAI's format: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


def join_text_parts(message: Message) -> Message:
    """Return the message with its text parts (`[{"type": "text", "text": "..."}]`) joined into one text.

    If a part is not text, return the message unchanged.
    """
    if not _has_parts(message) or find_non_text_part(message["content"]) is not None:
        return message
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def _has_parts(message: Message) -> bool:
    return isinstance(message.get("content"), list | tuple)


def find_non_text_part(content: Sequence[Any]) -> tuple[int, str] | None:
    """Return position (from 1) and type of the first part that is not text, or None if all parts are text."""
    for number, part in enumerate(content, start=1):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            return number, str(kind)
        if not isinstance(part.get("text"), str):
            return number, "without a `text`"
    return None


START = "start"
"""Key in a task's data for the initial state of the task, if the prompt does not describe this state.

The value identifies the state, for example as a hash of the initial files. Two tasks with different values
are different tasks, even if their prompts are equal.
"""

ROLLOUT_DEADLINE: ContextVar[float] = ContextVar("ROLLOUT_DEADLINE", default=math.inf)
"""Deadline of the current rollout, as a value of `time.monotonic()`.

A rollout that exceeds its deadline has an error and no reward. An environment can read the deadline, and stop
and score the rollout earlier.
"""

FinishReason = Literal["stop", "length"]
"""End of a reply. `stop`: the reply is complete. `length`: the reply reached a length limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem of an environment. Only the environment reads `data`, for example the accepted answers."""

    id: str
    messages: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for message in self.messages:
            if isinstance(message, Mapping) and _has_parts(message):
                object.__setattr__(self, "messages", tuple(map(join_text_parts, self.messages)))
                return


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Reply of the policy in one turn. `text` is the complete sampled text.

    `message` is the assistant message to append to the conversation. It has `content`, `reasoning_content` if
    the chat template separates reasoning, and `tool_calls` if the model called tools. A call that cannot be
    parsed has the name "", and the model's text as its arguments.
    """

    text: str
    finish_reason: FinishReason
    message: Message
    prompt_tokens: int = 0
    """Number of prompt tokens. 0 if the policy does not count tokens."""
    completion_tokens: int = 0
    """Number of reply tokens. 0 if the policy does not count tokens."""
    no_room: bool = False
    """True if the policy sampled no token, because the conversation fills the context."""
    stopped_by: str | None = None
    """Text of `CallOptions.stop` that ended the reply, or None."""
    tokens: ReplyTokens | None = None
    """Tokens of the reply. None if the policy does not return tokens."""
    text_logprobs: Sequence[tuple[str, float]] | None = None
    """Text and log-prob of each token, from a policy without token ids. None if not available."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyTokens:
    """Prompt tokens and sampled tokens of a reply. `logprobs` has the log-prob of each of `token_ids`.

    `token_ids` includes the final token, such as an end token.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """Options of one call of the policy: limits and form of the reply.

    The environment cannot set sampling parameters, such as the temperature.
    """

    max_tokens: int | None = None
    """Maximum number of reply tokens. The policy may have a lower limit."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply. The reply does not include the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the reply, in addition to the end tokens of the model."""
    must_call: bool = False
    """True if the reply must be a tool call."""
    tool: str | None = None
    """Name of the tool that the model must call. None: the model chooses."""
    logprobs: bool = False
    """True if the caller needs the log-probs of the reply."""
    trained: bool = True
    """True if the policy records the reply for training.

    If False, such as for the reply of an opponent, the reply also does not count toward the limits on turns
    and tokens.
    """


DEFAULT_OPTIONS = CallOptions()
"""Options of a call without any limit or condition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of one rollout.

    A rollout that fails has an `error` and no `reward`. It does not score 0. `components` are numbers for the
    log that do not change the reward. `stop_reason` is a short text, such as "answered" or "truncated". The
    optional `turn_rewards` have one entry per call of `Policy.chat`, and add up to `reward`. `boundary` is
    the part of the rollout that failed. Buckeye does not retry a failure of the boundary "task", because the
    task is invalid. The boundary "config" means that the configuration of the environment is invalid. Such a
    failure ends the run, unless a rollout of the environment has had a reward before.

    `pending` is the id of a rollout of a `GroupEnvironment` without a reward. The rollout gets its reward at
    the end of its group. `explanations` maps names of components to the reasons for their values, as text.
    `trace` has the frames of an error, outermost first. Buckeye sets `trace`, not the environment.
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
            check_reward(self.reward)  # now, so that the traceback has the author's line
        elif sum(value is not None for value in (self.reward, self.error, self.pending)) != 1:
            raise ValueError("an Outcome has either a reward or an error")
        if self.reward is None or self.turn_rewards is None:
            return
        total = math.fsum(self.turn_rewards)
        if not math.isclose(total, self.reward, rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError(f"turn_rewards add up to {total:g}, but the reward is {self.reward:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Test of an environment: the reward for `reply` to `task` must be between `low` and `high`.

    `buckeye env check` runs the probes of an environment's optional method `probes() -> Sequence[Probe]`. In
    a multi-turn environment, the policy sends `reply` in every turn.

    With `component`, the name of a component that a judge gives, the range is that of a person's grade. It
    measures how often the judge agrees.
    """

    name: str
    task: Task
    reply: str
    low: float
    high: float
    component: str | None = None

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"probe {self.name!r}: low ({self.low:g}) must not exceed high ({self.high:g})")


class Policy(Protocol):
    """Model that an environment calls. Each rollout has its own instance."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Sample the next assistant message. Raise `InferenceError` if no engine can reply."""
        ...


@runtime_checkable
class OptionsPolicy(Protocol):
    """Policy with a method `ask`, which is `chat` with options."""

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

        Raise `InferenceError` if no engine can reply, and `UsageError` if the model does not support an
        option or a message.
        """
        ...


@runtime_checkable
class ToolAwarePolicy(Protocol):
    """Policy that needs a list of the tools, such as a person who plays the model.

    An environment that describes its tools in the prompt does not pass them to `chat`, but to `set_tools`.
    """

    def set_tools(self, tools: Sequence[Tool], form: str) -> None:
        """Set the tools that the policy may call.

        `form` is the template of a reply that calls a tool. The policy replaces `{call}` in it by the call,
        such as `search(query="cats")`.
        """
        ...


@runtime_checkable
class TokenPolicy(Protocol):
    """Policy that can also continue a text or token ids, and that returns the tokens of its replies."""

    seq_len: int
    """Maximum number of tokens of a prompt and its reply together."""

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Reply:
        """Sample the continuation of a text, or of token ids.

        Raise `InferenceError` if no engine can reply, and `UsageError` for an unsupported option.
        """
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of one token."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Environment that has tasks, and runs a rollout of a task with a policy."""

    name: str

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, in a fixed order. Raise `KeyError` for an unknown split.

        The sequence may create its tasks lazily.
        """
        ...

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Run one rollout. Calls run concurrently, so a call must not change state that calls share."""
        ...


@runtime_checkable
class GroupEnvironment(Environment, Protocol):
    """Environment in which the reward of a rollout depends on the other rollouts of its group."""

    async def rollout_in_group(self, task: Task, policy: Policy) -> Outcome:
        """Run one rollout. Return an outcome without a reward.

        The outcome has an id in `pending`, or an `error` if the rollout failed.
        """
        ...

    async def finish_group(self, task: Task, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Return the outcomes of a group with their rewards, in the given order.

        Outcomes with an error stay unchanged.
        """
        ...


# Splits of an environment's tasks.

TRAIN = "train"


def split_names(environment: Environment) -> tuple[str, ...]:
    """Return the names of an environment's splits. The default is `train` and `eval`, if they have tasks.

    Raise `UsageError` if the environment has no split.
    """
    listed: Sequence[str] | None = getattr(environment, "splits", None)
    if listed is not None:
        return tuple(listed)
    found = tuple(name for name in (TRAIN, "eval") if _has_tasks(environment, name))
    if not found:
        raise UsageError(
            f"environment {environment.name} has neither a `train` nor an `eval` split",
            code="BK-ENV-TASKS",
            hint="add one of these splits, or list the names of all splits in a member `splits`",
        )
    return found


def _has_tasks(environment: Environment, name: str) -> bool:
    try:
        return len(tasks_of(environment, name)) > 0
    except KeyError:
        return False


def tasks_of(environment: Environment, split: str) -> Sequence[Task]:
    """Return the tasks of a split. Raise `KeyError` if the split does not exist.

    Raise `UsageError` for any other error of the environment, such as a `KeyError` with another key, and if
    the result is not a sequence of tasks. Only the first task is checked, because a sequence may create its
    tasks lazily.
    """
    call = f"`tasks({split!r})` of environment {environment.name}"
    try:
        tasks = environment.tasks(split)
        problem, hint = _tasks_problem(tasks)
    except THIRD_PARTY_ERRORS as error:
        pattern = rf"(?<!\w)({re.escape(split)}|splits?)(?!\w)"
        is_missing = isinstance(error, KeyError) and (not error.args or re.search(pattern, str(error)))
        if is_missing or isinstance(error, BuckeyeError):
            raise
        place = location_of(frames_of(error, CODE_FOLDER))
        raise UsageError(
            f"{call} raised {type(error).__name__}: {error}{place}",
            code="BK-ENV-TASKS",
            hint=f"fix this error. For a split that does not exist, raise KeyError({split!r})",
        ) from error
    if problem:
        raise UsageError(f"{call} returned {problem}", code="BK-ENV-TASKS", hint=hint)
    return tasks


def required_tasks(environment: Environment, split: str, *, name: str | None = None) -> Sequence[Task]:
    """Return the tasks of a split. Raise `UsageError` if reading fails, or if the split is missing or empty.

    `name` is that of the environment in the error.
    """
    title = f"environment {name or environment.name}"
    try:
        tasks = tasks_of(environment, split)
    except KeyError as error:
        raise UsageError(
            f"{title} has no split {split!r}",
            code="BK-ENV-TASKS",
            hint=f"use one of its splits: {', '.join(split_names(environment))}",
        ) from error
    if not len(tasks):
        message, hint = f"{title} has no tasks in its split {split!r}", "check its dataset and its arguments"
        raise UsageError(message, code="BK-ENV-TASKS", hint=hint)
    return tasks


def _tasks_problem(tasks: Any) -> tuple[str, str]:
    """Return what is wrong with the tasks of a split, and a hint; or two empty texts."""
    if not hasattr(tasks, "__len__") or not hasattr(tasks, "__getitem__"):
        if inspect.iscoroutine(tasks):
            tasks.close()  # else Python warns that nothing awaited it
        return f"an object of type {type(tasks).__name__}", "return a list of tasks"
    if not len(tasks):
        return "", ""
    first = tasks[0]
    if not isinstance(first, Task):
        hint = "make each task with `buckeye.envs.base.Task(id=..., messages=..., data=...)`"
        return f"a {type(first).__name__}, not a Task, as its first task", hint
    if not isinstance(first.id, str):
        return f"a first task whose id is {first.id!r}", "make the id a text"
    if not all(isinstance(message, Mapping) for message in first.messages):
        hint = 'write a list of messages: [{"role": "user", "content": "..."}]'
        return f"a first task whose messages are {str(first.messages)[:60]!r}", hint
    return "", ""
