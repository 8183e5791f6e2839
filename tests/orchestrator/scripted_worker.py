"""Rollout worker with letters in place of a tokenizer: `python -m tests.orchestrator.scripted_worker FD`."""

import asyncio
import sys
import time

from buckeye.base.process import die_with_parent
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.inference.client import SamplingParams
from buckeye.inference.client.follower import FollowingClient
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.rollout_runner import recording_runner
from buckeye.orchestrator.rollout_worker import Parts, serve
from buckeye.orchestrator.task_sampler import TaskSampler
from tests.orchestrator.fakes import LetterEnvironment, LetterRenderer
from tests.waiting import HANG


class OddLetters(LetterEnvironment):
    """Environment whose messages are hard to send: half a surrogate pair, objects, a number as key."""

    async def rollout(self, task, policy):
        outcome = await super().rollout(task, policy)
        policy.messages = (
            *policy.messages,
            {"role": "tool", "content": "\ud800", "at": time, "n": 1 << 70, 7: 1},
        )
        return outcome


def environments():
    return [NamedEnvironment(name="letters", environment=OddLetters(turns=2, sleep=0.02))]


def open_parts(setup, report_lost):
    config = OrchestratorConfig.model_validate_json(setup.config)
    client = FollowingClient(
        config.client.base_url, api_key=None, timeout=HANG, model="m", on_lost=report_lost
    )
    params = SamplingParams(max_tokens=8)
    runner = recording_runner(config, client, LetterRenderer(), seed=setup.seed, params=params)
    return Parts(TaskSampler(environments(), seed=config.seed), runner, client)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve(int(sys.argv[1]), open_parts))
