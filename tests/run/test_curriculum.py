"""`rl` with a curriculum: refused where there is none, and the same tasks after a resume."""

import json

import pytest

from buckeye.monitor.metrics import read_metrics

CELLS = '''
"""Three cells: always solved, solved by about half of the replies, and never solved."""

from buckeye.envs.base import Outcome, Task


class Cells:
    name = "cells"

    def tasks(self, split):
        return self.curriculum()["sum/2"]

    def curriculum(self):
        prompts = [{"role": "user", "content": f"say {i}"} for i in range(20)]
        return {
            f"sum/{depth}": [
                Task(id=f"{depth}-{i}", messages=(p,), data={"depth": depth}) for i, p in enumerate(prompts)
            ]
            for depth in (1, 2, 3)
        }

    async def rollout(self, task, policy):
        reply = await policy.chat(list(task.messages))
        return Outcome(reward=float({1: 1, 2: sum(map(ord, reply.text)) % 2, 3: 0}[task.data["depth"]]))


def load_environment():
    return Cells()
'''


@pytest.fixture
def cells(runner):
    (runner.root / "cells.py").write_text(CELLS)

    def rl(output, *words):
        words = ("--orchestrator.env.0.id", "cells.py", "--orchestrator.zero-spread", "drop", *words)
        return runner.rl(output, "--orchestrator.curriculum", *words, steps=5, level=0)

    return rl


def played(runner, output):
    """Task and reward of every rollout of every step, and what the curriculum made of them."""
    steps = []
    for step, metrics in sorted(runner.metrics(output, "orchestrator").items()):
        lines = (runner.root / output / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        rollouts = [(r["group"], r["task_id"], r["reward"]) for r in map(json.loads, lines)]
        numbers = {key: value for key, value in metrics.items() if key.startswith("curriculum/")}
        steps.append((step, rollouts, numbers, metrics.get("groups/dropped_no_spread", 0)))
    return steps


@pytest.mark.slow
def test_a_resumed_run_is_dealt_the_same_tasks(runner, cells):
    weights = runner.root / "out" / "weights" / "step_5" / "model.safetensors"
    straight = runner.run(cells("out", "--ckpt.interval", 2))
    assert straight.returncode == 0, straight.stderr
    steps, final = played(runner, "out"), weights.read_bytes()
    resumed = runner.run(cells("out", "--ckpt.interval", 2, "--ckpt.resume-step", 2))
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    records = [
        r for r in read_metrics(runner.root / "out" / "metrics.jsonl") if r["process"] == "orchestrator"
    ]
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert played(runner, "out") == steps
    assert weights.read_bytes() == final
    assert sum(dropped for *_, dropped in steps) > 0
    last = steps[-1][2]
    assert last["curriculum/cells/sum/1/solve_rate"] == 1.0
    assert last["curriculum/cells/sum/3/solve_rate"] == 0.0
    assert last["curriculum/cells/sum/2/weight"] == pytest.approx(1 / 1.2)


def test_a_curriculum_that_no_environment_has_is_refused(runner):
    reason = "orchestrator.curriculum is true, but no environment has a curriculum: letters has none"
    planned = runner.here(runner.rl("out", "--orchestrator.curriculum", "--dry-run"))
    assert planned.returncode == 0
    assert reason in planned.stderr
    words = ("--model.name", runner.model, "--env.0.id", "letters.py", "--output-dir", "out", "--curriculum")
    done = runner.here(runner.argv("worker", "orchestrator", *words))
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
