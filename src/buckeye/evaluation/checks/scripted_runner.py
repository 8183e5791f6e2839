"""Run rollouts with scripted replies, without a model."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from buckeye.envs.base import Environment, Outcome, Policy, Task
from buckeye.envs.scripted import ScriptedPolicy
from buckeye.orchestrator.rollout_runner import run_rollout

ROLLOUT_SECONDS = 30.0
TOLERANCE = 1e-9
"""Tolerance for rounding of a reward."""

_CONCURRENT = 8
_FIRST = 8


@dataclass(frozen=True, slots=True)
class ScriptedRollout:
    """Task, scripted reply and outcome. An exception becomes an outcome with an error, as in a run."""

    task: Task
    reply: str
    outcome: Outcome

    @property
    def reward(self) -> float:
        """Reward; NaN if the rollout has none."""
        return math.nan if self.outcome.reward is None else float(self.outcome.reward)


class ScriptedRunner:
    """Runner of rollouts with scripted replies that records errors and rewards outside [0, 1].

    `first` are its first rollouts without an error.

    `begin_phase` sets the current phase and its deadline. Rollouts after the deadline are skipped, and
    rollouts that the deadline cuts off are dropped. Both count as `missed`, not as errors.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.rollouts = 0
        self.first: list[ScriptedRollout] = []
        self.errored: list[ScriptedRollout] = []
        self.out_of_range: list[ScriptedRollout] = []
        self.missed: Counter[str] = Counter()
        self._phase, self._deadline = "", math.inf

    def begin_phase(self, phase: str, deadline: float) -> None:
        """Start the phase `phase`, until `deadline` on the monotonic clock."""
        self._phase, self._deadline = phase, deadline

    @property
    def has_time(self) -> bool:
        """True before the deadline of the current phase."""
        return time.monotonic() < self._deadline

    async def run_all(self, replies: Sequence[tuple[Task, str]]) -> list[ScriptedRollout | None]:
        """Run a rollout for each pair, some concurrently. Results are in the given order."""
        slots = asyncio.Semaphore(_CONCURRENT)

        async def run_one(task: Task, reply: str) -> ScriptedRollout | None:
            async with slots:
                outcome = await self.outcome(task, ScriptedPolicy(reply))
            return None if outcome is None else ScriptedRollout(task, reply, outcome)

        results = await asyncio.gather(*(run_one(task, reply) for task, reply in replies))
        return [self._count(rollout) for rollout in results]

    async def outcome(self, task: Task, policy: Policy) -> Outcome | None:
        """Run one rollout with any policy, and return its outcome; None if the deadline ended the rollout.

        A rollout takes at most `ROLLOUT_SECONDS`. This method does not count the rollout.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            return None
        seconds = min(ROLLOUT_SECONDS, left)
        outcome = await run_rollout(lambda: self.environment.rollout(task, policy), seconds, self.environment)
        cut_off = outcome.boundary == "timeout" and left < ROLLOUT_SECONDS and not self.has_time
        return None if cut_off else outcome

    def _count(self, rollout: ScriptedRollout | None) -> ScriptedRollout | None:
        if rollout is None:
            self.missed[self._phase] += 1
            return None
        self.rollouts += 1
        if rollout.outcome.error is not None:
            self.errored.append(rollout)
        elif not -TOLERANCE <= rollout.reward <= 1.0 + TOLERANCE:
            self.out_of_range.append(rollout)
        if rollout.outcome.error is None and len(self.first) < _FIRST:
            self.first.append(rollout)
        return rollout
