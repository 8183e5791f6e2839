"""Many rollouts at a time, by servers of their own and by a gateway: nothing leaks, nothing is mixed up."""

import asyncio
import gc
import os
import sys
import uuid
from contextlib import nullcontext

import psutil
import pytest
from tests.mcp.environment.leaks import assert_none_left, processes_with
from tests.mcp.environment.scripted import Scripted
from tests.mcp.environment.test_rollout import DONE, RAW, config, task
from tests.mcp.gateway.client import gateway
from tests.mcp.gym import mapping

from buckeye.mcp.environment import McpEnvironment

ROLLOUTS, AT_A_TIME = 2_000, 64
PATIENT = config(
    action_mappings={"act": mapping("act", "text"), "recall": mapping("recall")},
    defaults={"max_turns": 4, "setup_timeout": 1_200.0, "tool_timeout": 1_200.0},
)
"""On a busy machine 64 servers that start at once take minutes."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_000)]


@pytest.mark.parametrize("by_gateway", [False, True])
def test_2000_rollouts_64_at_a_time(tmp_path, by_gateway):
    """Every rollout writes a secret and reads it back; memory stays bounded; no process is left, and there
    are never more than one for each rollout in progress."""
    marker = f"marker-{uuid.uuid4()}"
    words = ["--command", f"{sys.executable} {RAW}", "--sessions", str(AT_A_TIME), "--queue-seconds", "1200"]
    most_processes, memory = 0, []

    async def run(given, process):
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
                memory.append(process.memory_info().rss)

        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(one(number)) for number in range(ROLLOUTS)]
            while not all(rollout.done() for rollout in playing):
                most_processes = max(most_processes, len(await asyncio.to_thread(processes_with, marker)))
                await asyncio.sleep(1.0)

    with gateway(tmp_path, *words) if by_gateway else nullcontext() as running:
        fields = {}
        if running:
            fields["mcp_config"] = {"board": {"url": running.url, "headers": {"Env-Marker": marker}}}
        environment = McpEnvironment(PATIENT, {"train": [task(marker, **fields)]})
        (given,) = environment.tasks("train")
        asyncio.run(run(given, psutil.Process(running.process.pid if running else os.getpid())))
        if running:
            running.until(lambda: running.status()["running"] == 0, "sessions are left")
            assert running.status()["started"] == ROLLOUTS
    assert_none_left(marker)
    assert not list((tmp_path / "cache" / "buckeye" / "gateway").glob("*/*"))
    assert by_gateway or 8 <= most_processes <= AT_A_TIME  # walls of a gateway are processes too
    assert memory[-1] < memory[1] + 32 * 2**20, memory
    assert len(os.listdir(f"/proc/{os.getpid()}/fd")) < 100
