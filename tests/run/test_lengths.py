"""Real runs in which some rollouts take long: every token is trained."""

import pytest

ENVIRONMENT = '''
"""Some rollouts have three more turns, and each turn takes as long as some steps."""

import asyncio

from buckeye.envs.base import Outcome, Task


class Long:
    name = "long"

    def tasks(self, split):
        return [Task(id=f"t{i}", messages=({"role": "user", "content": f"say {i}"},)) for i in range(40)]

    async def rollout(self, task, policy):
        messages = list(task.messages)
        reply = await policy.chat(messages)
        long = task.id in ("t3", "t17")
        reward = sum(map(ord, reply.text)) % 7 / 6
        for turn in range(3 * long):
            await asyncio.sleep(1.0)
            messages += [reply.message, {"role": "user", "content": "say"}]
            reply = await policy.chat(messages)
        return Outcome(reward=reward, components={"long": float(long)})


def load_environment():
    return Long()
'''


@pytest.mark.e2e
@pytest.mark.slow
def test_rollouts_go_on_while_the_weights_change_and_every_token_is_trained_on(runner):
    (runner.root / "long.py").write_text(ENVIRONMENT)
    words = ("--orchestrator.env.0.id", "long.py", "--orchestrator.rollouts-per-example", 2)
    words += ("--trainer.optim.lr", "1e-4", "--orchestrator.sampling.max-tokens", 3)
    runner.ok(runner.rl("out", *words, steps=60), limit=300)
    records = runner.metrics("out", "orchestrator").values()
    assert sum(r.get("groups/dropped_stale", 0) for r in records) == 0
    assert all(r["rollouts/played"] == r["rollouts/trained"] == 16 for r in records)
    ages = [step - r["oldest_version"] for step in range(60) for r in runner.rollouts("out", step)]
    assert 5 <= max(ages) <= 8
    learned = runner.metrics("out", "trainer").values()
    assert all(r["samples_left_out"] == 0 for r in learned)
    assert max(r.get("staleness_max", 0) for r in learned) == max(ages)
    assert all(abs(r["mismatch_kl"]) < 0.01 for r in learned if "mismatch_kl" in r)
