"""`rl replay --all`: an entire run replayed, after kills of its processes."""

import json
import random
import shutil
import signal
import subprocess

import pytest
from tests.command import run_here
from tests.waiting import wait_for

from buckeye.run_files.record import read_record

pytestmark = pytest.mark.e2e

LATE = '''
"""Environment whose answers come at random times, and some never."""

import asyncio
import random

from buckeye.envs.base import Outcome, Task


class Late:
    name = "late"

    def tasks(self, split):
        prompts = [{"role": "user", "content": f"say {i}"} for i in range(40)]
        return [Task(id=f"{split}-{i}", messages=(p,)) for i, p in enumerate(prompts)]

    async def rollout(self, task, policy):
        messages, said = list(task.messages), ""
        for turn in range(random.choice((1, 1, 2))):
            await asyncio.sleep(random.expovariate(20))
            reply = await policy.chat(messages)
            said += reply.text
            messages = [*messages, dict(reply.message), {"role": "user", "content": f"say {turn}"}]
        if random.random() < 0.05:
            raise RuntimeError("it broke")
        return Outcome(reward=said[:3].count("a") / 3)


def load_environment():
    return Late()
'''
PROCESSES = ("trainer 0", "orchestrator", "inference 0")


def played_with_kills(runner, seed, *, steps=14, kills=3):
    """Start an asynchronous run, kill random processes, and return which."""
    rng = random.Random(seed)
    (runner.root / "letters.py").write_text(LATE)
    settings = (
        "--ckpt.interval",
        3,
        "--trainer.trained.record-order",
        "true",
        "--trainer.trained.max-bytes",
        1,
    )
    words = runner.rl("out", *settings, "--orchestrator.seed", seed, steps=steps, level=2)
    running = subprocess.Popen(
        words, cwd=runner.root, env=runner.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    killed = []
    try:
        for step in sorted(rng.sample(range(1, steps - 1), kills)):
            wait_for(lambda at=step: running.poll() is not None or at in runner.metrics("out", "trainer"))
            title = rng.choice(PROCESSES)
            known = {one.title: one for one in read_record(runner.root / "out").processes}
            process = known[title].process() if title in known else None
            if process is not None and running.poll() is None:
                process.send_signal(signal.SIGKILL)
                killed.append(title)
        printed, _ = running.communicate()
    finally:
        running.kill()
    assert running.returncode == 0, printed
    return killed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_asynchronous_run_with_kills_is_repeated_to_the_last_bit(runner, seed):
    assert played_with_kills(runner, seed)
    done = run_here("rl", "replay", "out", "--all", "--json", cwd=runner.root)
    found = json.loads(done.stdout)
    assert (done.returncode, found["start"]["step"], found["step"]) == (0, 0, 13)
    assert found["identical"]
    weights = [one["replayed"] for one in found["comparisons"] if one["stage"] == "weights"]
    manifest = json.loads((runner.root / "out/weights/step_14/manifest.json").read_text())
    assert (len(weights), weights[-1]) == (14, manifest["checksum"])


def test_all_steps_of_a_run(finished, tmp_path):
    run = shutil.copytree(finished.root / "out", tmp_path / "run", symlinks=True)
    done = run_here("rl", "replay", "run", "--all", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    last = done.stdout.splitlines()[-1]
    assert last == f"5 steps (0 to 4) from {finished.model}: the same to the last bit."
    shutil.rmtree(run / "trained/step_3")
    done = run_here("rl", "replay", "run", "--all", cwd=tmp_path)
    assert done.returncode == 1
    assert "Batch 3" in done.stdout
    record = run / "trained/step_1/record.json"
    record.write_text(record.read_text().replace('"weights": "', '"weights": "0'))
    done = run_here("rl", "replay", "run", "--all", cwd=tmp_path)
    assert done.returncode == 1
    assert "in step 1: weights" in done.stdout
    for step in (0, 1, 2):
        shutil.rmtree(run / f"trained/step_{step}")
    done = run_here("rl", "replay", "run", "--all", cwd=tmp_path)
    assert done.returncode == 2
    assert "step 4" in done.stderr
    done = run_here("rl", "replay", "run", "--all", "--step", 1, cwd=tmp_path)
    assert (done.returncode, "BK-CLI-CONFLICT" in done.stderr) == (2, True)


def test_all_batches_are_no_number_of_them(finished, tmp_path):
    words = finished.rl("x", "--trainer.trained.record-order", "true", "--trainer.trained.keep", 3)
    done = run_here(*words[3:], "--dry-run", cwd=tmp_path, env=finished.env)
    assert done.returncode == 2
    assert "record_order" in done.stderr
