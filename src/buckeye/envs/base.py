"""What an environment author implements, and what the author may call.

An environment has tasks and plays one rollout of a task with a policy. It never sees tokens: `Policy.chat`
records token ids, log-probs, masks and policy versions behind the author's back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Message = Mapping[str, Any]
"""One chat message in the OpenAI form: `role`, `content`, and `tool_calls` / `tool_call_id` where they
apply."""

Tool = Mapping[str, Any]
"""One tool in the OpenAI form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

START = "start"
"""The name in a task's data of what its world begins with, where the prompt does not say that: two tasks that
differ in it are two, though they are asked in the same words."""

FinishReason = Literal["stop", "length"]
"""Why a reply ended: by itself, or cut off at a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem of an environment. `data` is the environment's own and may hold the accepted answers."""

    id: str
    messages: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of one rollout.

    `reward` is None exactly when `error` is set: an errored rollout has no reward and is never scored 0.
    `components` are logged and never paid. `stop_reason` is a short text such as "answered" or "truncated".
    `turn_rewards`, which is optional, says what each turn was paid, one entry for each call of `Policy.chat`;
    they add up to `reward`.
    """

    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = "done"
    error: str | None = None
    turn_rewards: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.error is not None):
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
