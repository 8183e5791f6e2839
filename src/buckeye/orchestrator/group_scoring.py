"""Scoring for environments that score all rollouts of a task together, after the last rollout ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from buckeye.envs.base import (
    Environment,
    GroupEnvironment,
    Outcome,
    Task,
)
from buckeye.envs.outcome_validation import error_outcome, outcome_of_exception, validate_outcome
from buckeye.errors import THIRD_PARTY_ERRORS


async def score_pending_outcomes(
    environment: Environment,
    task: Task,
    outcomes: Sequence[Outcome],
    turns: Sequence[int],
    *,
    timeout: float,
) -> list[Outcome]:
    """Return the outcomes of a task's rollouts with their rewards.

    `turns` has the number of turns per rollout. Rollouts that are not scored within `timeout` seconds become
    errors. Raise `CancelledError` only if the caller's task is cancelled.
    """
    if not any(outcome.pending is not None for outcome in outcomes):
        return list(outcomes)
    assert isinstance(environment, GroupEnvironment)
    try:
        async with asyncio.timeout(timeout):
            finished = list(await environment.finish_group(task, outcomes))
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise  # the run is ending
        return _unscored(outcomes, "the environment cancelled its scoring")
    except TimeoutError:
        return _unscored(outcomes, f"the group was not scored within {timeout:g} s")
    except THIRD_PARTY_ERRORS as error:
        failed = outcome_of_exception("score", error)
        return [outcome if outcome.pending is None else failed for outcome in outcomes]
    if len(finished) != len(outcomes):
        return _unscored(
            outcomes, f"finish_group() returned {len(finished)} outcomes for {len(outcomes)} rollouts"
        )
    return [
        outcome
        if outcome.pending is None
        else _with_reward(scored, count, environment)  # an errored rollout keeps its error and gets no reward
        for outcome, scored, count in zip(outcomes, finished, turns, strict=True)
    ]


def _unscored(outcomes: Sequence[Outcome], reason: str) -> list[Outcome]:
    return [outcome if outcome.pending is None else _failed(reason) for outcome in outcomes]


def _with_reward(given: object, turns: int, environment: object) -> Outcome:
    outcome = validate_outcome(given, environment)
    if outcome.pending is not None:
        return _failed("finish_group() returned no reward for this rollout")
    if outcome.turn_rewards is not None and len(outcome.turn_rewards) != turns:
        return _failed(f"turn_rewards has {len(outcome.turn_rewards)} entries for {turns} turns")
    return outcome


def _failed(reason: str) -> Outcome:
    return error_outcome("score", f"score: {reason}")
