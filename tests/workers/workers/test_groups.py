"""Rewards that depend on the other rollouts of a task."""

import asyncio
import os
import signal

import pytest
from tests.orchestrator.fakes import make_runner
from tests.waiting import HANG
from tests.workers.workers.conftest import Says, play, rogue

from buckeye.envs.base import GroupEnvironment, Outcome, Task
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.group_scoring import score_pending_outcomes
from buckeye.orchestrator.task_sampler import GroupTask


@pytest.fixture(scope="module")
def grouped(opened):
    return opened({"group": True}, processes=2)


def finish(environment, task, outcomes):
    return asyncio.run(score_pending_outcomes(environment, task, outcomes, [1] * len(outcomes), timeout=HANG))


def play_in_group(environment, task, count):
    async def all_of_them():
        return await asyncio.gather(*(environment.rollout_in_group(task, Says()) for _ in range(count)))

    return asyncio.run(all_of_them())


def test_a_group_is_scored_when_all_of_it_has_ended(environment, grouped):
    assert isinstance(grouped, GroupEnvironment)
    assert not isinstance(environment, GroupEnvironment)
    assert play(grouped, "good")[0].reward == 1.0  # a single rollout is a group by itself
    outcomes = play_in_group(grouped, rogue("good"), 3)
    assert [(o.reward, o.error) for o in outcomes] == [(None, None)] * 3
    assert len({outcome.pending for outcome in outcomes}) == 3
    finished = finish(grouped, rogue("good"), outcomes)
    assert sorted(outcome.reward for outcome in finished) == [0.0, 0.0, 1.0]
    assert all(outcome.pending is None for outcome in finished)


def test_a_group_that_cannot_be_scored_is_an_error(grouped, wording):
    outcomes = play_in_group(grouped, rogue("good", "unscored"), 2)
    finished = finish(grouped, rogue("good", "unscored"), outcomes)
    assert [(outcome.reward, outcome.boundary) for outcome in finished] == [(None, "score")] * 2
    assert "ValueError: " in finished[0].error


def test_a_group_whose_worker_has_ended_is_an_error(grouped):
    outcomes = play_in_group(grouped, rogue("good"), 2)
    for pid in grouped.workers():
        os.kill(pid, signal.SIGKILL)
    finished = finish(grouped, rogue("good"), outcomes)
    assert [(outcome.reward, outcome.boundary) for outcome in finished] == [(None, "worker")] * 2


class Ranked:
    """Environment that scores by the order in which rollouts end; `finish` may fail in several ways."""

    name = "ranked"

    def __init__(self, finish=None):
        self._count, self._finish = 0, finish

    def tasks(self, split):
        return [Task(id="t", messages=())]

    async def rollout(self, task, policy):
        raise AssertionError("a group is played")

    async def rollout_in_group(self, task, policy):
        self._count += 1
        return Outcome(reward=None, pending=str(self._count))

    async def finish_group(self, task, outcomes):
        if self._finish is not None:
            return self._finish(outcomes)
        return [Outcome(reward=float(outcome.pending)) for outcome in outcomes]


def group_of(environment, size):
    async def play_it():
        player = make_runner(None, renderer=None)
        env = NamedEnvironment(name="ranked", environment=environment)
        return await player.start_group(GroupTask(index=0, env=env, task=environment.tasks("train")[0]), size)

    return asyncio.run(play_it())


WRONG = {
    "finish_group() returned 1 outcomes for 2 rollouts": lambda outcomes: [Outcome(reward=1.0)],
    "finish_group() returned no reward": lambda outcomes: outcomes,
    "turn_rewards has 1 entries for 0 turns": lambda o: [Outcome(reward=1.0, turn_rewards=[1.0])] * 2,
    "ZeroDivisionError": lambda outcomes: 1 / 0,
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_group_scoring_is_an_error(message):
    assert sorted(group_of(Ranked(), 3).rewards) == [1.0, 2.0, 3.0]
    group = group_of(Ranked(WRONG[message]), 2)
    assert group.rewards == []
    assert all(message in error for error in group.errors)
    assert len(group.errors) == 2


def test_failed_rollouts_are_not_scored_and_cancelled_scoring_is_an_error():
    task = rogue("good")
    failed = Outcome(reward=None, error="step: E: no", boundary="step")
    waiting = Outcome(reward=None, pending="1/a")

    class Group:
        name = "group"
        tasks = rollout = rollout_in_group = print  # never called

        def __init__(self, scored):
            self.scored = scored

        async def finish_group(self, task, outcomes):
            if self.scored is None:
                raise asyncio.CancelledError
            return [Outcome(reward=self.scored) for _ in outcomes]

    kept, scored = finish(Group(0.5), task, [failed, waiting])
    assert (kept, scored.reward) == (failed, 0.5)
    kept, cancelled = finish(Group(None), task, [failed, waiting])
    assert (kept, cancelled.reward, cancelled.boundary) == (failed, None, "score")
