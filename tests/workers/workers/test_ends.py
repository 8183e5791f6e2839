"""No worker and no child of a worker outlives the process that runs the rollouts."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import wait_for
from tests.workers.workers.conftest import ADAPTER, is_gone

pytestmark = pytest.mark.e2e

PROGRAM = f"""
import asyncio, os, signal, sys
from pathlib import Path
from buckeye.envs.base import Task
from buckeye.workers.environment import open_worker_environment
from buckeye.envs.settings import WorkerSettings

settings = WorkerSettings(adapter=Path({str(ADAPTER)!r}), processes=2, log_dir=Path("logs"), log_name="rogue")
environment = open_worker_environment("rogue", {{}}, Path(sys.executable), settings)

async def play(*names):
    messages = ({{"role": "user", "content": "x"}},)
    await asyncio.gather(*(environment.rollout(Task(id=n, messages=messages), None) for n in names))

asyncio.run(play("ignores_signals", "spawns"))
print("workers", *environment.workers(), flush=True)
"""

DROPPED = """
del environment  # as after an exception in the caller
raise SystemExit(3)
"""
ENDS = {
    "by itself": ("", 0),
    "by an error": ("raise RuntimeError('enough')", 1),
    "in the middle": ("asyncio.run(asyncio.wait_for(play('waits'), 0.2))", 1),
    "at once": ("os._exit(3)", 3),
    "by SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "by SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "by SIGINT": ("os.kill(os.getpid(), signal.SIGINT); asyncio.run(play('waits'))", -signal.SIGINT),
}
SLOW = {"by an error", "in the middle", "at once", "by SIGTERM", "by SIGINT"}


MARKS = {"by SIGKILL": pytest.mark.smoke} | dict.fromkeys(SLOW, pytest.mark.slow)


@pytest.mark.parametrize("how", [pytest.param(how, marks=MARKS.get(how, ())) for how in ENDS])
def test_workers_and_their_children_end_with_the_process(tmp_path, how):
    end, code = ENDS[how]
    done = subprocess.run([sys.executable, "-c", PROGRAM + end], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "never awaited" not in done.stderr
    assert "destroyed" not in done.stderr
    printed = "".join(path.read_text() for path in Path(tmp_path, "logs").iterdir())
    pids = [int(pid) for pid in re.findall(r"\d+", done.stdout)] + [
        int(pid) for pid in re.findall(r"child (\d+)", printed)
    ]
    assert len(pids) == 3
    wait_for(lambda: all(is_gone(pid) for pid in pids))


def test_abandoned_workers_are_closed_before_exit(tmp_path):
    loading, _, _ = PROGRAM.partition("async def play")
    farewell = str(tmp_path / "farewell")
    program = loading.replace('"rogue", {}', f'"rogue", {{"farewell": {farewell!r}}}') + DROPPED
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert Path(farewell).exists()
