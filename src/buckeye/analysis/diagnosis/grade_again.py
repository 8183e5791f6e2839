"""Test of `--try` that sends recorded replies to the environment again, and compares the rewards."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.statistics import share_interval
from buckeye.envs.base import Environment, Message, Task, required_tasks
from buckeye.envs.scripted import RecordedPolicy
from buckeye.envs.settings import with_variables
from buckeye.evaluation.checks.scripted_runner import ScriptedRunner
from buckeye.monitor.finding import Finding
from buckeye.monitor.rollouts import RecordedRollout
from buckeye.workers.loading import open_environment

Array = npt.NDArray[np.float64]

_ROLLOUTS = 40
_MIN_ROLLOUTS = 10
_SECONDS = 20.0
_EQUAL = 1e-6
_MOST_OTHER = 0.1


def grade_again(facts: DiagnosisFacts) -> Iterator[Finding]:
    """Compare recorded rewards with those of newly opened environments, which get the replies in turn.

    Two environments get them in the recorded order: if they disagree, grading depends on chance. A third one
    gets them in reverse: if it disagrees, grading depends on other rollouts. Raise `LookupError` at the end
    with the environments whose rollouts cannot be repeated, because replies call tools, tasks are gone, or
    rollouts do not end in time.
    """
    settings, untested = facts.run.setting("orchestrator.env") or [], list[str]()
    for env in settings:
        opened = _open(env)
        name = opened.name
        pairs = _repeatable(facts, opened, str(env.get("name") or name) if len(settings) > 1 else None)
        rewards = np.empty((3, 0))
        if len(pairs) >= _MIN_ROLLOUTS:
            rewards = asyncio.run(_grade([opened, _open(env), _open(env)], pairs))
        known = np.isfinite(rewards).all(0)
        if known.sum() < _MIN_ROLLOUTS:
            untested.append(f"{name}: {known.sum()} of {len(pairs)} rollouts could be repeated")
            continue
        recorded = np.array([rollout.reward for _, rollout in pairs], float)
        of = f"of {known.sum()} recorded rollouts of {name}"
        finding = _compare(facts, of, rewards[:, known], recorded[known])
        if finding is not None:
            yield finding
    if untested:
        raise LookupError(f"{'; '.join(untested)} ({_MIN_ROLLOUTS} are needed)")


def _compare(facts: DiagnosisFacts, of: str, rewards: Array, recorded: Array) -> Finding | None:
    """Return the finding on the rewards f64[3, N] of new environments, and the recorded ones f64[N]."""
    first, again, reverse = rewards
    if other := _differing(first, again):
        seen = f"two new environments gave {other} {of} different rewards"
        # a run that learns tolerates the noise of its judge
        return None if facts.has_risen else facts.finding("grader_random", seen)
    if other := _differing(first, reverse):
        seen = f"a new environment gives {other} {of} another reward if other rollouts came before"
        return facts.finding("graded_otherwise", seen)
    if other := _differing(first, recorded):
        return facts.finding("graded_otherwise", f"a new environment gives {other} {of} another reward")
    return None


def _differing(rewards: Array, others: Array) -> int:
    """Return the number of different rewards; 0 if it is insignificant."""
    count = int((np.abs(rewards - others) > _EQUAL).sum())
    return count if share_interval(count, len(rewards), 2.0)[0] > _MOST_OTHER else 0


def _open(env: Mapping[str, Any]) -> Environment:
    variables = with_variables(tuple(env.get("variables") or ()))
    return open_environment(str(env["id"]), env.get("args") or {}, variables)


def _repeatable(
    facts: DiagnosisFacts, environment: Environment, name: str | None
) -> list[tuple[Task, RecordedRollout]]:
    """Return training rollouts of the whole run with their tasks. Their replies call no tools."""
    tasks = {task.id: task for task in required_tasks(environment, "train")}
    rows = facts.query(
        "SELECT path, at, bytes, grp, number FROM rollouts WHERE {trained} AND NOT truncated "
        "AND (? IS NULL OR env = ?) ORDER BY step, grp, number",
        name,
        name,
    )
    rollouts = [facts.run.text_at(*row) for row in rows[:: max(1, len(rows) // _ROLLOUTS)]]
    return [
        (tasks[one.task_id], one)
        for one in rollouts
        if one is not None
        and one.task_id in tasks
        and one.messages
        and not any(message.get("tool_calls") for message in one.messages)
    ]


async def _grade(environments: Sequence[Environment], pairs: Sequence[tuple[Task, RecordedRollout]]) -> Array:
    """Return the rewards by environment and pair, f64[3, N]. The last environment gets the pairs in reverse.

    A reward is NaN if a rollout did not end in time, or not in the recorded number of turns.
    """
    first, again, reverse = (ScriptedRunner(environment) for environment in environments)
    for runner in (first, again, reverse):
        runner.begin_phase("recorded replies", time.monotonic() + 3 * _SECONDS)
    rewards = [[await _reward(runner, *pair) for pair in pairs] for runner in (first, again)]
    backward = [await _reward(reverse, *pair) for pair in reversed(pairs)]
    return np.array([*rewards, backward[::-1]], float)


async def _reward(runner: ScriptedRunner, task: Task, rollout: RecordedRollout) -> float:
    replies: list[Message] = [one for one in rollout.messages if one.get("role") == "assistant"]
    outcome = await runner.outcome(task, RecordedPolicy(replies))
    return math.nan if outcome is None or outcome.reward is None else float(outcome.reward)
