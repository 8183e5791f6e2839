"""Test of a newly installed environment: one rollout with a fixed reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from buckeye.envs.base import Environment, Outcome, Task, tasks_of
from buckeye.envs.scripted import ScriptedPolicy
from buckeye.errors import BuckeyeError
from buckeye.workers.installed.record import InstalledEnvironment

REPLY = "I do not know."
_ROLLOUT_SECONDS = 300.0
_MAX_CHARACTERS = 200
_EXAMPLES = {
    "reasoning-gym": "reasoning-gym/chain_sum",
    "textarena": "textarena/GuessTheNumber-v0",
    "gymnasium": "gymnasium/FrozenLake-v1",
    "skyrl-gym": "skyrl-gym/gsm8k",
    "inspect-ai": "inspect-ai/FILE.py@NAME",
    "openenv": "openenv/MODULE:APP",
    "bfcl-eval": "bfcl-eval/simple_python",
    "ors-sdk": "ors-sdk/MODULE:CLASS",
    "openreward": "openreward/MODULE:CLASS",
    "hud": "hud/MODULE",
}
"""Example environment of each library with many environments. It needs no downloads."""
WITHOUT_EXAMPLE = ("skyrl-gym", "inspect-ai", "openenv", "ors-sdk", "openreward", "hud")
"""Libraries that contain no tasks, so that they have no test rollout."""


def example_id(installed: InstalledEnvironment) -> str:
    """Return the id of the environment to test. For a library, it is the id of an example."""
    return _EXAMPLES.get(installed.generation, installed.id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoke:
    """Result of a smoke rollout. `tasks` is the number of tasks in `split`."""

    tasks: int
    split: str
    task: Task
    outcome: Outcome

    def text(self) -> str:
        """Return a report of a few lines, with the task, the reply and the reward."""
        question = str(self.task.messages[-1].get("content", "")) if self.task.messages else ""
        outcome = self.outcome
        return "\n".join(
            [
                f"tasks       {self.tasks} in split {self.split!r}",
                f"task        {self.task.id}: {json.dumps(_shorten(question), ensure_ascii=False)}",
                f"reply       {json.dumps(REPLY)}",
                f"reward      {outcome.reward:g} ({outcome.stop_reason})",
                *(f"            {name} = {value:g}" for name, value in outcome.components.items()),
            ]
        )


async def smoke_rollout(installed: InstalledEnvironment, variables: Sequence[str]) -> Smoke:
    """Load an environment in its own interpreter, and run its first task with the reply REPLY.

    The worker gets the environment variables `variables`. Raises BuckeyeError if the environment cannot be
    loaded or has no tasks, or if the rollout fails.
    """
    from buckeye.envs.settings import WorkerSettings
    from buckeye.workers.loading import open_environment

    settings = WorkerSettings(
        python=installed.python,
        isolation="process",
        variables=tuple(variables),
        rollout_timeout=_ROLLOUT_SECONDS,
    )
    try:
        environment = open_environment(example_id(installed), {}, settings)
    except BuckeyeError as error:
        raise _failed(installed, str(error), error.code) from None
    try:
        split, tasks = await asyncio.to_thread(_first_split, environment)
        outcome = await environment.rollout(tasks[0], ScriptedPolicy(REPLY))
    finally:
        close = getattr(environment, "close", None)
        if close is not None:
            await close()
    if outcome.reward is None:
        where = f" ({outcome.boundary})" if outcome.boundary else ""
        raise _failed(installed, f"the rollout of task {tasks[0].id} failed{where}: {outcome.error}")
    return Smoke(tasks=len(tasks), split=split, task=tasks[0], outcome=outcome)


def _first_split(environment: Environment) -> tuple[str, Sequence[Task]]:
    for split in ("train", "eval"):
        with suppress(KeyError):
            tasks = tasks_of(environment, split)
            if len(tasks):
                return split, tasks
    raise BuckeyeError(f"{environment.name} has no `train` and no `eval` tasks", code="BK-ENV-TASKS")


def _failed(installed: InstalledEnvironment, problem: str, code: str = "BK-ENV-FAILED") -> BuckeyeError:
    return BuckeyeError(
        f"{installed.id} is installed, but {problem}",
        code=code,
        hint=f"if it needs arguments: buckeye env play {installed.id} --arg NAME=VALUE. "
        f"Else check its interpreter {installed.python}, or remove it: buckeye env remove {installed.id}",
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
