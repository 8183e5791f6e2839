"""Playing rollouts with replies that were written beforehand: no model, no tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from buckeye.envs.base import Environment, FinishReason, Message, Outcome, Policy, Reply, Task, Tool
from buckeye.errors import InferenceError

TURN_LIMIT = 1000
ROLLOUT_SECONDS = 30.0
_AT_ONCE = 8


@dataclass(slots=True)
class ScriptedPolicy:
    """Says `text` in every turn, and at most `TURN_LIMIT` times."""

    text: str
    finish_reason: FinishReason = "stop"
    turns: int = field(default=0, init=False)

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """The same reply again. Raises InferenceError after `TURN_LIMIT` of them."""
        del messages, tools
        if self.turns:
            await asyncio.sleep(0)  # so that the deadline can end a rollout that never stops asking
        self.turns += 1
        if self.turns > TURN_LIMIT:
            raise InferenceError(f"the rollout asked for more than {TURN_LIMIT} replies")
        message = {"role": "assistant", "content": self.text}
        return Reply(text=self.text, finish_reason=self.finish_reason, message=message)


class FailingPolicy:
    """Stands for an engine that does not answer."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Always raises InferenceError."""
        del messages, tools
        await asyncio.sleep(0)
        raise InferenceError("no engine answers (a test of how the environment takes it)")


@dataclass(frozen=True, slots=True)
class Played:
    """A task, what was said, and how it ended. An exception is an outcome with an error, as in a run."""

    task: Task
    reply: str
    outcome: Outcome

    @property
    def reward(self) -> float:
        """The reward; nan where there is none."""
        return math.nan if self.outcome.reward is None else float(self.outcome.reward)


class Player:
    """Plays rollouts with written replies, and keeps the count of what no reward should be."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.rollouts = 0
        self.errored: list[Played] = []
        self.outside: list[Played] = []

    async def play(self, task: Task, reply: str) -> Played:
        """One rollout in which `reply` is said in every turn."""
        return (await self.play_all([(task, reply)]))[0]

    async def play_all(self, replies: Sequence[tuple[Task, str]]) -> list[Played]:
        """A rollout for each, some at a time; the results are in the given order."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(task: Task, reply: str) -> Played:
            async with slots:
                return Played(task, reply, await outcome_with(self.environment, task, ScriptedPolicy(reply)))

        return [
            self._counted(played)
            for played in await asyncio.gather(*(one(task, reply) for task, reply in replies))
        ]

    def _counted(self, played: Played) -> Played:
        self.rollouts += 1
        if played.outcome.error is not None:
            self.errored.append(played)
        elif not 0.0 <= played.reward <= 1.0:  # nan is outside too
            self.outside.append(played)
        return played


async def outcome_with(environment: Environment, task: Task, policy: Policy) -> Outcome:
    """The outcome of one rollout, within `ROLLOUT_SECONDS`."""
    try:
        async with asyncio.timeout(ROLLOUT_SECONDS):
            outcome = await environment.rollout(task, policy)
    except TimeoutError:
        return _failed(f"no outcome within {ROLLOUT_SECONDS:g} s")
    except Exception as error:  # not our code: whatever it raises ends this rollout only
        return _failed(f"{type(error).__name__}: {error}")
    if not isinstance(outcome, Outcome):
        return _failed(f"rollout() returned {type(outcome).__name__}, not an Outcome")
    if outcome.reward is not None and not isinstance(outcome.reward, (int, float)):
        return _failed(f"the reward is a {type(outcome.reward).__name__}, not a number")
    return outcome


def _failed(why: str) -> Outcome:
    return Outcome(reward=None, stop_reason="error", error=why)
