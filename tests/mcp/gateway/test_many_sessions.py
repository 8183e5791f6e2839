"""Many rollouts at a time through the gateway: nothing leaks, nothing is mixed up."""

import asyncio
import sys
import uuid

import psutil
import pytest
from tests.mcp.environment.leaks import processes_with
from tests.mcp.environment.scripted import Scripted
from tests.mcp.environment.test_many_sessions import PATIENT
from tests.mcp.environment.test_rollout import DONE, RAW, task
from tests.mcp.gateway.client import gateway
from tests.waiting import wait_for

from buckeye.mcp.environment import McpEnvironment

ROLLOUTS, AT_A_TIME = 2_000, 64

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_000)]


def test_2000_rollouts_64_at_a_time_through_the_gateway(tmp_path):
    marker = f"marker-{uuid.uuid4()}"
    words = ["--command", f"{sys.executable} {RAW}", "--sessions", str(AT_A_TIME), "--queue-seconds", "1200"]
    with gateway(tmp_path, *words) as running:
        server = {"url": running.url, "headers": {"Env-Marker": marker}}
        environment = McpEnvironment(PATIENT, {"train": [task(marker, mcp_config={"board": server})]})
        (given,) = environment.tasks("train")
        process = psutil.Process(running.process.pid)
        memory = []
        slots = asyncio.Semaphore(AT_A_TIME)

        async def one(number):
            async with slots:
                secret = f"secret-{number}-{uuid.uuid4()}"
                policy = Scripted(f'<tool>act("{secret}")</tool>', "<tool>recall()</tool>", DONE)
                outcome = await environment.rollout(given, policy)
            assert outcome.error is None
            assert policy.last_read == f"<result>\n{secret}\n</result>"
            if number % 200 == 199:
                memory.append(process.memory_info().rss)

        async def run():
            async with asyncio.TaskGroup() as group:
                for number in range(ROLLOUTS):
                    group.create_task(one(number))

        asyncio.run(run())
        running.until(lambda: running.status()["running"] == 0, "sessions are left")
        assert running.status()["started"] == ROLLOUTS
        assert memory[-1] < memory[len(memory) // 2] + 32 * 2**20, memory
    wait_for(lambda: not processes_with(marker), "processes are left")
    assert not list((tmp_path / "cache" / "buckeye" / "gateway").glob("*/*"))
