"""Evaluations of a whole run: of exactly the versions that are due, beside training, once each."""

import json
import signal

import pytest

from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BESIDE = '''
"""A rollout of an evaluation waits until one more batch is handed over, and is paid for that."""

import asyncio
import time
from pathlib import Path

from buckeye.envs.base import Outcome, Task


def batches():
    return len(list(Path("out/rollouts").glob("step_*.jsonl")))


class Beside:
    name = "beside"

    def tasks(self, split):
        prompts = [{"role": "user", "content": f"say {i}"} for i in range(40)]
        return [Task(id=f"{split}-{i}", messages=(p,)) for i, p in enumerate(prompts)]

    async def rollout(self, task, policy):
        reply = await policy.chat(list(task.messages))
        if task.id.startswith("train"):
            await asyncio.sleep(TRAINING)
            return Outcome(reward=reply.text[:3].count("a") / 3)
        before, end = batches(), time.monotonic() + EVALUATION
        while time.monotonic() < end and batches() == before:
            await asyncio.sleep(0.01)
        return Outcome(reward=float(batches() > before))


def load_environment():
    return Beside()
'''
WORDS = ("--orchestrator.env.0.id", "beside.py", "--orchestrator.eval.env.0.id", "beside.py")
WORDS += ("--orchestrator.eval.num-examples", 3, "--orchestrator.eval.interval", 3)


def write(runner, *, training, evaluation):
    """The environment, with seconds that a rollout takes, at most."""
    source = BESIDE.replace("TRAINING", str(training)).replace("EVALUATION", str(evaluation))
    (runner.root / "beside.py").write_text(source)


def lines(runner, version):
    text = (runner.root / "out" / "evals" / f"step_{version}" / "beside.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_third_version_is_measured_while_groups_are_played(runner):
    write(runner, training=0.3, evaluation=10)
    runner.ok(runner.rl("out", *WORDS, steps=12))
    evals = runner.metrics("out", "eval")
    assert sorted(evals) == [0, 3, 6, 9, 12]
    rewards = [evals[version]["eval/beside/avg@1"] for version in (0, 3, 6, 9)]
    assert rewards == [1.0] * 4  # at 12 there is nothing left to train on
    for version in evals:
        assert {line["oldest_version"] for line in lines(runner, version)} == {version}
    records = runner.metrics("out", "orchestrator")
    assert sorted(records) == list(range(12))
    assert all(record["batch/off_policy_level/max"] <= 1 for record in records.values())


@pytest.mark.parametrize("level", [0, 1])
def test_a_run_that_is_ended_in_an_evaluation_repeats_and_leaves_out_none(runner, level):
    write(runner, training=0, evaluation=3)
    words = (*WORDS, "--ckpt.interval", 1)
    running = runner.start(runner.rl("out", *words, steps=8, level=level))
    log = runner.root / "out" / "logs" / "orchestrator.stdout"
    wait_for(lambda: log.exists() and "Running evals for checkpoint step 3" in log.read_text(), "step 3")
    running.send_signal(signal.SIGINT)
    printed, _ = running.communicate()
    assert running.returncode == 130, printed
    runner.ok(runner.rl("out", *words, "--resume", steps=8, level=level))
    text = (runner.root / "out" / "metrics.jsonl").read_text()
    measured = [
        record["step"] for record in map(json.loads, text.splitlines()) if record["process"] == "eval"
    ]
    assert measured == [0, 3, 6, 8]
