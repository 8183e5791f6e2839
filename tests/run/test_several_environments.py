"""`rl` on several environments, each played in its own way."""

import json
from collections import Counter

import pytest

pytestmark = pytest.mark.slow

BROKEN_FOR_A_WHILE = '''
"""Fails while a file is there, which goes after some rollouts."""

from pathlib import Path

from buckeye.envs.base import Outcome, Task

TRIES = Path("tries.txt")


class Flaky:
    name = "flaky"

    def tasks(self, split):
        prompts = [{"role": "user", "content": f"say {i}"} for i in range(20)]
        return [Task(id=f"{split}-{i}", messages=(p,)) for i, p in enumerate(prompts)]

    async def rollout(self, task, policy):
        with TRIES.open("a") as file:
            file.write(".")
        if TRIES.stat().st_size <= 8:
            raise RuntimeError("the service is down")
        reply = await policy.chat(list(task.messages))
        return Outcome(reward=reply.text[:3].count("b") / 3)


def load_environment():
    return Flaky()
'''
OWN = (
    *("--orchestrator.env.1.id", "letters.py", "--orchestrator.env.1.name", "second"),
    *("--orchestrator.env.1.rollouts-per-example", 2, "--orchestrator.env.1.sampling.temperature", 0.7),
    *("--orchestrator.env.1.sampling.max-tokens", 3, "--orchestrator.env.1.ratio", 2),
)


def played(runner, output, steps):
    """Environment, group and tokens of every rollout, by step."""
    found = []
    for step in steps:
        lines = (runner.root / output / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        found.append([(r["env"], r["group"], r["completion_tokens"]) for r in map(json.loads, lines)])
    return found


def test_sizes_shares_and_sampling_are_their_own_and_a_resume_goes_on_exactly(runner):
    words = (*OWN, "--ckpt.interval", 2)
    straight = runner.run(runner.rl("out", *words, steps=4, level=0))
    assert straight.returncode == 0, straight.stderr
    steps = played(runner, "out", range(4))
    for rollouts in steps:
        sizes = Counter((env, group) for env, group, _ in rollouts)
        assert all(size == {"letters": 4, "second": 2}[env] for (env, _), size in sizes.items())
        assert 16 <= len(rollouts) < 16 + 4
        assert all(tokens <= 3 for env, _, tokens in rollouts if env == "second")
    groups = Counter(env for env, _ in {(env, group) for step in steps for env, group, _ in step})
    assert groups["second"] == pytest.approx(2 * groups["letters"], abs=2)
    metrics = runner.metrics("out", "orchestrator")[0]
    assert metrics["env/second/share"] + metrics["env/letters/share"] == pytest.approx(1.0)
    assert metrics["env/second/completion_len/mean"] <= 3

    weights = (runner.root / "out" / "weights" / "step_4" / "model.safetensors").read_bytes()
    resumed = runner.run(runner.rl("out", *words, "--ckpt.resume-step", 2, steps=4, level=0))
    assert resumed.returncode == 0, resumed.stderr
    assert played(runner, "out", range(4)) == steps
    assert (runner.root / "out" / "weights" / "step_4" / "model.safetensors").read_bytes() == weights


def test_an_environment_that_fails_pauses_alone_and_comes_back(runner):
    (runner.root / "flaky.py").write_text(BROKEN_FOR_A_WHILE)
    words = (
        *("--orchestrator.env.1.id", "flaky.py", "--orchestrator.env-pause.after-failures", 1),
        *("--orchestrator.env-pause.seconds", 0.5, "--orchestrator.max-rollout-retries", 0),
    )
    done = runner.run(runner.rl("out", *words, steps=30))
    assert done.returncode == 0, done.stderr
    log = (runner.root / "out" / "logs" / "orchestrator.stdout").read_text()
    assert "Environment flaky is paused for 0.5 s: 1 groups in a row failed" in log
    assert "the service is down" in log
    assert "Environment flaky works again" in log
    metrics = runner.metrics("out", "orchestrator")
    assert sum(m.get("env/flaky/errors/step", 0) for m in metrics.values()) == 8
    assert {m["env/letters/errored"] for m in metrics.values() if "env/letters/errored" in m} == {0}
    assert metrics[29]["env/flaky/share"] > 0
