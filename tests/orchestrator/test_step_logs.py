"""Log lines about the first replies of a run, and about replies without content."""

import asyncio
from dataclasses import replace

import pytest

from buckeye.envs.base import Task
from buckeye.monitor.log import SAMPLE
from buckeye.orchestrator.environments import NamedEnvironment, check_environments
from buckeye.orchestrator.step_logs import log_first_replies

from .made_rollouts import group, rollout


def asked(reward, prompt, reply):
    task = Task(id="t", messages=({"role": "user", "content": prompt},))
    return replace(rollout(reward), task=task, replies=(reply,))


@pytest.fixture
def samples(caplog):
    """Function that returns the lines of the level SAMPLE."""
    caplog.set_level(SAMPLE, logger="buckeye")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == SAMPLE]


def test_replies_with_the_highest_a_middle_and_the_lowest_reward_are_logged(samples):
    rewards = (0.25, 1.0, 0.0, 0.5)
    rollouts = [asked(reward, f"question {reward}", f"reply\n{reward}") for reward in rewards]
    log_first_replies([group(*rollouts[:2]), group(*rollouts[2:], rollout(None))])
    assert samples() == [
        f"letters: reward {reward:.3f} for 'question {reward}' -> 'reply {reward}'"
        for reward in (1.0, 0.25, 0.0)
    ]


def test_long_texts_are_cut_and_few_rollouts_are_logged_once(samples):
    log_first_replies([group(asked(1.0, "q" * 500, ""))])
    assert samples() == [f"letters: reward 1.000 for '{'q' * 120}...' -> ''"]
    log_first_replies([])
    assert len(samples()) == 1


class Reported:
    async def baseline_report(self):
        return "without content, empty replies get 0.000"


def test_rewards_of_replies_without_content_are_logged_before_the_first_step(samples):
    named = [
        NamedEnvironment(name="a", environment=Reported()),
        NamedEnvironment(name="b", environment=object()),
    ]
    asyncio.run(check_environments(named))
    assert samples() == ["a: without content, empty replies get 0.000"]
