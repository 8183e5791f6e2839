"""`rl` on an environment of a careless author: the run goes on, and says what is wrong where."""

import json

import pytest

CARELESS = """
import time

import numpy as np

from buckeye.envs.base import Outcome, Task


class Careless:
    name = "careless"

    def tasks(self, split):
        prompts = [{"role": "user", "content": f"say {i}"} for i in range(16)]
        return [Task(id=f"{split}-{i}", messages=(p,)) for i, p in enumerate(prompts)]

    async def rollout(self, task, policy):
        reply = await policy.chat(list(task.messages))
        number = int(task.id.partition("-")[2])
        if number == 0:
            return Outcome(reward=1.0, components={"style": "good"})
        if number == 1:
            return Outcome(reward=self.grade(task))
        if number == 2:
            return Outcome(reward="1.0")
        return Outcome(reward=np.float32(reply.text[:3].count("a") / 3), components={"n": np.int64(number)})

    def grade(self, task):
        time.sleep(0.3)
        return task.data["answer"]


def load_environment():
    return Careless()
"""


@pytest.mark.e2e
def test_the_run_goes_on_and_says_what_is_wrong_where(runner):
    (runner.root / "careless.py").write_text(CARELESS)
    words = ("--orchestrator.env.0.id", "careless.py", "--orchestrator.max-rollout-retries", 0)
    runner.ok(runner.rl("out", *words, steps=6, level=0))
    metrics = runner.metrics("out", "orchestrator")
    assert sorted(metrics) == list(range(6))
    assert sum(values["env/careless/errored"] for values in metrics.values()) >= 12
    log = "\n".join(path.read_text() for path in (runner.root / "out" / "logs").rglob("orchestrator*"))
    assert "careless.py:29 in grade: " in log
    assert "careless.py:28 in grade" in log
    dropped = [
        json.loads(line)
        for path in sorted((runner.root / "out" / "rollouts").glob("*.dropped.jsonl"))
        for line in path.read_text().splitlines()
    ]
    errors = {line["task_id"]: line["error"] for line in dropped if line["dropped"] == "errored"}
    assert errors["train-0"] == "component 'style' is 'good', not a number"
    assert errors["train-1"].startswith("KeyError: 'answer' (careless.py:")
    assert "'1.0'" in errors["train-2"]
