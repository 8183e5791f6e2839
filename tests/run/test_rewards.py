"""`rl` with rewards by turn, shaping, filters and tasks that are solved for good; also across a resume."""

import json

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TWO_TURNS = '''
"""Two turns, each paid for an a among its first three characters; the first tasks are always solved."""

from buckeye.envs.base import Outcome, Task


class TwoTurns:
    name = "two-turns"

    def tasks(self, split):
        prompts = [{"role": "user", "content": f"say {i}"} for i in range(12)]
        return [Task(id=f"{split}-{i}", messages=(p,)) for i, p in enumerate(prompts)]

    async def rollout(self, task, policy):
        messages, paid = list(task.messages), []
        for _ in range(2):
            reply = await policy.chat(messages)
            messages += [reply.message, {"role": "user", "content": "say 1"}]
            paid.append(0.5 * ("a" in reply.text[:3]))
        if task.id in {"train-0", "train-1", "train-2"}:
            paid = [0.5, 0.5]
        return Outcome(reward=sum(paid), turn_rewards=paid)


def load_environment():
    return TwoTurns()
'''


def test_a_run_by_turns_with_shaping_and_filters(runner):
    (runner.root / "two_turns.py").write_text(TWO_TURNS)
    words = (
        *("--orchestrator.env.0.id", "two_turns.py", "--orchestrator.zero-spread", "drop"),
        *("--orchestrator.advantage.type", "turn", "--orchestrator.advantage.discount", "0.5"),
        *("--orchestrator.seq-len", "128"),
        *("--orchestrator.reward-shaping.length-penalty", "0.1", "--ckpt.interval", "2"),
        *("--orchestrator.reward-shaping.stop-reason-penalties.length", "0.25"),
        *("--orchestrator.reward-shaping.max-length", "12"),
    )
    runner.ok(runner.rl("out", *words, steps=4, level=0))
    out = runner.root / "out"
    final = (out / "weights" / "step_4" / "model.safetensors").read_bytes()
    metrics = runner.metrics("out", "orchestrator")
    for step, values in metrics.items():
        lines = (out / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        rollouts = [json.loads(line) for line in lines]
        raw = [r["reward"] for r in rollouts]
        shaped = [r["reward"] - 0.1 * r["completion_tokens"] / 12 - 0.25 * r["truncated"] for r in rollouts]
        assert [r["shaped_reward"] for r in rollouts] == pytest.approx(shaped)
        assert [sum(r["turn_rewards"]) for r in rollouts] == pytest.approx(raw)
        assert values["reward/mean"] == pytest.approx(sum(raw) / len(raw))
        assert values["shaped_reward/mean"] == pytest.approx(sum(shaped) / len(shaped))
    assert any(values["reward_shaping/stop_reason/share"] > 0 for values in metrics.values())
    runner.ok(runner.rl("out", *words, "--ckpt.resume-step", "2", steps=4, level=0))
    assert (out / "weights" / "step_4" / "model.safetensors").read_bytes() == final
    again = runner.metrics("out", "orchestrator")  # the last record of a step
    assert [again[s]["reward/mean"] for s in (2, 3)] == [metrics[s]["reward/mean"] for s in (2, 3)]
