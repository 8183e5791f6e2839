"""Many concurrent rollouts, each with its own server: no leaks, no mixed-up sessions."""

import asyncio
import gc
import os
import uuid

import psutil
import pytest
from tests.mcp.environment.leaks import assert_none_left, processes_with
from tests.mcp.environment.scripted import Scripted
from tests.mcp.environment.test_rollout import DONE, config, task
from tests.mcp.gym import mapping

from buckeye.mcp.environment import McpEnvironment

ROLLOUTS, AT_A_TIME = 2_000, 64
PATIENT = config(
    action_mappings={"act": mapping("act", "text"), "recall": mapping("recall")},
    defaults={"max_turns": 4, "setup_timeout": 1_200.0, "tool_timeout": 1_200.0},
)
"""Long timeouts: on a busy machine 64 servers started at once take minutes."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_000)]


def test_2000_rollouts_leave_no_process_and_no_memory():
    """Every rollout writes a secret and reads it back, and memory stays bounded.

    There is at most one process per running rollout, and none at the end.
    """
    marker = f"marker-{uuid.uuid4()}"
    most_processes, memory = 0, []

    async def run(given):
        nonlocal most_processes
        slots = asyncio.Semaphore(AT_A_TIME)

        async def one(number):
            secret = f"secret-{number}-{uuid.uuid4()}"
            policy = Scripted(f'<tool>act("{secret}")</tool>', "<tool>recall()</tool>", DONE)
            async with slots:
                outcome = await environment.rollout(given, policy)
            assert outcome.error is None
            assert policy.last_read == f"<result>\n{secret}\n</result>"
            if number % (ROLLOUTS // 10) == 0:
                gc.collect()
                memory.append(psutil.Process().memory_info().rss)

        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(one(number)) for number in range(ROLLOUTS)]
            while not all(rollout.done() for rollout in playing):
                most_processes = max(most_processes, len(await asyncio.to_thread(processes_with, marker)))
                await asyncio.sleep(1.0)

    environment = McpEnvironment(PATIENT, {"train": [task(marker)]})
    asyncio.run(run(*environment.tasks("train")))
    assert_none_left(marker)
    assert 8 <= most_processes <= AT_A_TIME
    assert memory[-1] < memory[1] + 32 * 2**20, memory
    assert len(os.listdir(f"/proc/{os.getpid()}/fd")) < 100
