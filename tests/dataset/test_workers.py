"""Rewards in worker processes."""

import asyncio
import os

import pytest

from buckeye.envs.base import GroupEnvironment
from buckeye.envs.settings import WorkerSettings
from buckeye.errors import UsageError
from buckeye.workers.loading import open_environment
from tests.dataset.conftest import ROWS, Says, grade

BATCH = """
import os

def reward(completions, answer, **columns):
    if "crash" in completions:
        return [1 / 0]
    return [os.getpid() + len(completions) if c == a else 0.0 for c, a in zip(completions, answer)]
"""
SINGLE = "def reward(completion, completion_ids):\n    return len(completion_ids)\n"


@pytest.fixture
def in_worker(write):
    """Return `in_worker(source)`: the environment of a reward, in two worker processes."""
    environments = []

    def open_it(source):
        args = {"path": write("prompts.jsonl", ROWS), "reward": write("reward.py", source)}
        environments.append(
            open_environment("dataset", args, WorkerSettings(isolation="process", processes=2))
        )
        return environments[-1]

    yield open_it
    for environment in environments:
        asyncio.run(environment.close())


def test_a_function_for_a_group_runs_in_one_worker(in_worker):
    environment = in_worker(BATCH)
    assert isinstance(environment, GroupEnvironment)
    assert len(environment.tasks("train")) + len(environment.tasks("eval")) == len(ROWS)
    answer = environment.tasks("train")[0].data["row"]["answer"]
    first, second, third = grade(environment, answer, answer, "wrong")
    assert first.reward == second.reward
    assert first.reward - 3 in environment.workers()
    assert first.reward - 3 != os.getpid()
    assert third.reward == 0.0
    assert first.stop_reason == "answered"
    assert third.components == {"reward": 0.0}


def test_a_group_whose_function_fails_is_an_error_with_its_line(in_worker):
    environment = in_worker(BATCH)
    outcomes = grade(environment, "crash", "other")
    assert [(outcome.reward, outcome.boundary) for outcome in outcomes] == [(None, "score")] * 2
    assert "reward.py:6 in reward" in outcomes[0].error
    task = environment.tasks("train")[0]
    alone = asyncio.run(environment.rollout(task, Says(task.data["row"]["answer"])))
    assert alone.reward - 1 in environment.workers()


def test_tokens_are_unknown_in_a_worker(in_worker):
    (outcome,) = grade(in_worker(SINGLE), "x", ids=[1, 2])
    assert (outcome.reward, outcome.boundary) == (None, "score")


def test_a_wrong_reward_is_refused_with_its_line(in_worker, refusal):
    with refusal(UsageError) as caught:
        in_worker("def reward(completion, anwser):\n    return 1.0\n")
    assert caught.value.code == "BK-ENV-LOAD"
