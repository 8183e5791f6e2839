"""A process that an environment starts ends with the Buckeye process that opened the environment."""

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from tests.mcp.environment.leaks import processes_with

ENVIRONMENT = """
import subprocess, sys
from buckeye.envs.base import Outcome, Task
from buckeye.envs.single_turn import SingleTurnEnvironment

class Leaving(SingleTurnEnvironment):
    def grade(self, task, reply):
        for own_session in (False, True):
            argv = [sys.executable, "-c", "import time; time.sleep(600)", "{marker}"]
            subprocess.Popen(argv, start_new_session=own_session)
        return Outcome(reward=1.0)

def load_environment():
    return Leaving("leaving", {{"train": [Task(id="a", messages=({{"role": "user", "content": "x"}},))]}})
"""
COMMAND = """
import asyncio, os, signal, sys
from buckeye.config.environments import TrainEnvConfig
from buckeye.orchestrator.environments import load_environments
from tests.workers.workers.conftest import Says

path, isolation, ends = sys.argv[1:]

async def main():
    (env,) = load_environments([TrainEnvConfig(id=path, isolation=isolation)])
    outcome = await env.environment.rollout(env.environment.tasks("train")[0], Says())
    print(outcome.reward, outcome.error, flush=True)
    if ends == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if hasattr(env.environment, "close"):
        await env.environment.close()
    if ends == "stays":
        sys.stdin.read()

asyncio.run(main())
"""


def assert_ends(marker):
    ends = time.monotonic() + 20
    while (left := processes_with(marker)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert left == []


@pytest.fixture
def marker():
    name = f"marker-{uuid.uuid4()}"
    yield name
    for pid in processes_with(name):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ends", ["ends", "is killed"])
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_children_of_grade_end_with_the_command(tmp_path, marker, isolation, ends):
    path = tmp_path / "leaving.py"
    path.write_text(ENVIRONMENT.format(marker=marker))
    argv = [sys.executable, "-c", COMMAND, str(path), isolation, ends]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "1.0 None\n"
    assert_ends(marker)


def test_children_of_grade_in_a_worker_end_with_the_worker(tmp_path, marker):
    path = tmp_path / "leaving.py"
    path.write_text(ENVIRONMENT.format(marker=marker))
    argv = [sys.executable, "-c", COMMAND, str(path), "process", "stays"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout.readline() == "1.0 None\n"
        assert_ends(marker)
        command.stdin.close()
