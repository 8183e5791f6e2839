"""Playing rollouts with replies that were written beforehand: no model, no tokens."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from buckeye.envs.base import Environment, Outcome, Policy, Task
from buckeye.envs.scripted import ScriptedPolicy
from buckeye.orchestrator.player import play_outcome

ROLLOUT_SECONDS = 30.0
TOLERANCE = 1e-9
"""What rounding may do to a reward."""

_AT_ONCE = 8


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
    """Plays rollouts with written replies, and keeps the count of what no reward should be.

    `begin` says what is played, and until when. What the time is too short for is not played and counted as
    `missed`; a rollout that the end of the time cuts off is no error.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.rollouts = 0
        self.errored: list[Played] = []
        self.outside: list[Played] = []
        self.missed: Counter[str] = Counter()
        self._what, self._deadline = "", math.inf

    def begin(self, what: str, deadline: float) -> None:
        """From now on `what` is played, until `deadline` on the monotonic clock."""
        self._what, self._deadline = what, deadline

    @property
    def has_time(self) -> bool:
        """Whether the deadline is still to come."""
        return time.monotonic() < self._deadline

    async def play(self, task: Task, reply: str) -> Played | None:
        """One rollout in which `reply` is said in every turn; None without time for it."""
        return (await self.play_all([(task, reply)]))[0]

    async def play_all(self, replies: Sequence[tuple[Task, str]]) -> list[Played | None]:
        """A rollout for each, some at a time; the results are in the given order."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(task: Task, reply: str) -> Played | None:
            async with slots:
                outcome = await self.outcome(task, ScriptedPolicy(reply))
            return None if outcome is None else Played(task, reply, outcome)

        results = await asyncio.gather(*(one(task, reply) for task, reply in replies))
        return [self._counted(played) for played in results]

    async def outcome(self, task: Task, policy: Policy) -> Outcome | None:
        """That of one rollout with any policy, which is not counted; None without time for it."""
        return await outcome_with(self.environment, task, policy, self._deadline)

    def _counted(self, played: Played | None) -> Played | None:
        if played is None:
            self.missed[self._what] += 1
            return None
        self.rollouts += 1
        if played.outcome.error is not None:
            self.errored.append(played)
        elif not -TOLERANCE <= played.reward <= 1.0 + TOLERANCE:
            self.outside.append(played)
        return played


async def outcome_with(
    environment: Environment, task: Task, policy: Policy, deadline: float = math.inf
) -> Outcome | None:
    """The outcome of one rollout, within `ROLLOUT_SECONDS`; None if there was no time for it before
    `deadline`."""
    left = deadline - time.monotonic()
    if left <= 0:
        return None
    seconds = min(ROLLOUT_SECONDS, left)
    outcome = await play_outcome(lambda: environment.rollout(task, policy), seconds, environment)
    cut_off = outcome.boundary == "timeout" and left < ROLLOUT_SECONDS and time.monotonic() >= deadline
    return None if cut_off else outcome
