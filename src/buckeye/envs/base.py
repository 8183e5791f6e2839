"""What an environment author implements, and what the author may call.

An environment has tasks and plays one rollout of a task with a policy. It never sees tokens: `Policy.chat`
records token ids, log-probs, masks and policy versions behind the author's back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from buckeye.envs.stdlib_only.outcomes import check_reward
from buckeye.errors import UsageError

Message = Mapping[str, Any]
"""One chat message in the OpenAI form: `role`, `content`, and `tool_calls` / `tool_call_id` where they
apply."""

Tool = Mapping[str, Any]
"""One tool in the OpenAI form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


def joined_parts(message: Message) -> Message:
    """Return the message with its text parts (`[{"type": "text", "text": "..."}]`) as one text; with other
    parts, which `first_other_part` names, it is unchanged."""
    if not _has_parts(message) or first_other_part(message["content"]) is not None:
        return message
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def _has_parts(message: Message) -> bool:
    return isinstance(message.get("content"), list | tuple)


def first_other_part(content: Sequence[Any]) -> tuple[int, str] | None:
    """Return the number and type of the first part that is not text; None if all are."""
    for number, part in enumerate(content, start=1):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            return number, str(kind)
        if not isinstance(part.get("text"), str):
            return number, "without a `text`"
    return None


START = "start"
"""The name in a task's data of what its world begins with, where the prompt does not say that: two tasks that
differ in it are two, though they are asked in the same words."""

ROLLOUT_ENDS: ContextVar[float] = ContextVar("ROLLOUT_ENDS", default=math.inf)
"""When the rollout that is played is cut off, and so is an error, on the monotonic clock: an environment that
stops before can pay what was done until then."""

FinishReason = Literal["stop", "length"]
"""Why a reply ended: by itself, or cut off at a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem of an environment. `data` is the environment's own and may hold the accepted answers."""

    id: str
    messages: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(isinstance(message, Mapping) and _has_parts(message) for message in self.messages):
            object.__setattr__(self, "messages", tuple(map(joined_parts, self.messages)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What the policy said in one turn: `text` is all of it, as sampled.

    `message` can be appended to the conversation as it is. It has `content`, `reasoning_content` where the
    chat template keeps reasoning apart, and `tool_calls` where tools were offered and called. A call that
    could not be read has the name "" and, as its arguments, what was written.
    """

    text: str
    finish_reason: FinishReason
    message: Message
    prompt_tokens: int = 0
    """Tokens of the prompt; 0 where the policy does not count them."""
    completion_tokens: int = 0
    """Tokens of the reply; 0 where the policy does not count them."""
    no_room: bool = False
    """Whether nothing was sampled, because the conversation has filled the context."""
    stopped_by: str | None = None
    """The text of `CallOptions.stop` that ended the reply."""
    tokens: ReplyTokens | None = None
    """The tokens, where the policy knows them."""
    told_logprobs: Sequence[tuple[str, float]] | None = None
    """Text and log-prob of each token, from a policy that knows no token ids, where `CallOptions.logprobs`
    asked for them and they were given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyTokens:
    """A reply as sampled: `token_ids` and `logprobs` are aligned, with the token that ended it."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """What one call may ask for beyond its messages: less than the policy would say, or a certain form.

    How the policy samples (temperature and the like) is never a caller's choice.
    """

    max_tokens: int | None = None
    """At most so many tokens; never more than the policy's own limit."""
    stop: tuple[str, ...] = ()
    """The reply ends before the first of these texts."""
    stop_token_ids: tuple[int, ...] = ()
    """The reply ends with the first of these tokens too, beside those of the model."""
    must_call: bool = False
    """Whether the reply has to be a call of a tool."""
    tool: str | None = None
    """The tool that has to be called; None leaves the choice to the model."""
    logprobs: bool = False
    """Whether the caller wants the log-probs of the reply."""
    trained: bool = True
    """Whether the reply is recorded as one of the rollout. One that is not, an opponent's for example, is
    neither trained nor counted."""


NO_OPTIONS = CallOptions()
"""Of a call that asks for nothing beyond its messages."""


Boundary = Literal["load", "reset", "step", "model", "score", "agent", "worker", "timeout"]
"""Where a rollout failed: loading the environment, beginning an episode, playing it, asking the model,
scoring it, in the program that plays; then the process it was in, and its deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of one rollout.

    `reward` is None exactly when `error` is set: an errored rollout has no reward and is never scored 0.
    `components` are logged and never paid. `stop_reason` is a short text such as "answered" or "truncated".
    `turn_rewards`, which is optional, says what each turn was paid, one entry for each call of `Policy.chat`;
    they add up to `reward`. `boundary` says where an errored rollout failed. Only a `GroupEnvironment` leaves
    a rollout `pending`, which is then its name for it: neither reward nor error until the group is finished.
    `explanations` says of components, by their names, how they came about, for people. `trace` says where an
    error was raised: frames, outermost first. Whoever plays sets it.
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
            check_reward(self.reward)  # here, where the author's line is known
        elif sum(value is not None for value in (self.reward, self.error, self.pending)) != 1:
            raise ValueError("an Outcome has either a reward or an error")
        if self.reward is None or self.turn_rewards is None:
            return
        paid = math.fsum(self.turn_rewards)
        if not math.isclose(paid, self.reward, rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError(f"turn_rewards add up to {paid:g} and reward is {self.reward:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A reply whose reward is known: grading `reply` to `task` must pay between `low` and `high`.

    Equal bounds mean an exact score. An environment may offer its own as `probes() -> Sequence[Probe]`; they
    are played by `buckeye env check`. In an environment of many turns `reply` is what is said in every turn.
    """

    name: str
    task: Task
    reply: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"probe {self.name!r}: low is {self.low:g} and high is {self.high:g}")


class Policy(Protocol):
    """The model being trained, as an environment sees it. One instance serves one rollout."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Sample the next assistant message. Raises `InferenceError` if no engine can answer."""
        ...


@runtime_checkable
class OptionsPolicy(Protocol):
    """A policy that can also follow the options of a call. For the others a call's options are dropped."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """As `ask`, without options."""
        return await self.ask(messages, tools=tools)

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        options: CallOptions = NO_OPTIONS,
    ) -> Reply:
        """As `Policy.chat`. Raises `UsageError` for options or messages that the model cannot follow."""
        ...


@runtime_checkable
class TextCaller(Protocol):
    """A policy that is told what it may call where only words of the prompt say so: a person, or chance."""

    def may_call(self, tools: Sequence[Tool], form: str) -> None:
        """A reply in this form calls one of the tools: it has `name(argument=value, ...)` for `{call}`."""
        ...


@runtime_checkable
class TokenPolicy(Protocol):
    """A policy that can also go on with a text, or with token ids, and shows the tokens of its replies."""

    seq_len: int
    """How many tokens a prompt and its reply may have together."""

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        options: CallOptions = NO_OPTIONS,
    ) -> Reply:
        """Sample what follows a text, or token ids. Raises as `OptionsPolicy.ask`."""
        ...

    def token_text(self, token_id: int) -> str:
        """The text of one token."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Where the policy acts."""

    name: str

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, in a fixed order; may be generated lazily. Raises KeyError for an unknown
        split."""
        ...

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        """Play one rollout. Called concurrently; keeps no state between calls."""
        ...


@runtime_checkable
class GroupEnvironment(Environment, Protocol):
    """An environment whose rewards depend on the other rollouts of the same task."""

    async def rollout_in_group(self, task: Task, policy: Policy) -> Outcome:
        """As `rollout`, but what has not failed is left `pending`."""
        ...

    async def finish_group(self, task: Task, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """The outcomes of one task with their rewards, in the order given; errored ones stay as they are."""
        ...


# The splits of an environment's tasks.

TRAIN = "train"


def split_names(environment: Environment) -> tuple[str, ...]:
    """The splits an environment lists as `splits`, or those of `train` and `eval` that it has.

    Raises UsageError if it has none.
    """
    listed: Sequence[str] | None = getattr(environment, "splits", None)
    if listed is not None:
        return tuple(listed)
    found = tuple(name for name in (TRAIN, "eval") if _has(environment, name))
    if not found:
        raise UsageError(
            f"environment {environment.name} has neither a split 'train' nor 'eval'. Give it one, or list "
            "the names in a member `splits`."
        )
    return found


def _has(environment: Environment, name: str) -> bool:
    try:
        return len(environment.tasks(name)) > 0
    except KeyError:
        return False
