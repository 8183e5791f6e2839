"""`rl` on several environments with different sampling settings."""

from collections import Counter

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OWN = (
    *("--orchestrator.env.1.id", "letters.py", "--orchestrator.env.1.name", "second"),
    *("--orchestrator.env.1.rollouts-per-example", 2, "--orchestrator.env.1.sampling.temperature", 0.7),
    *("--orchestrator.env.1.sampling.max-tokens", 3, "--orchestrator.env.1.ratio", 2),
)


def played(runner, output, steps):
    """Return environment, group and tokens of every rollout, by step."""
    return [
        [(r["env"], r["group"], r["completion_tokens"]) for r in runner.rollouts(output, step)]
        for step in steps
    ]


def test_sizes_shares_and_sampling_are_their_own_and_a_resume_goes_on_exactly(runner):
    words = (*OWN, "--ckpt.interval", 2)
    runner.ok(runner.rl("out", *words, steps=4, level=0))
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
    runner.ok(runner.rl("out", *words, "--ckpt.resume-step", 2, steps=4, level=0))
    assert played(runner, "out", range(4)) == steps
    assert (runner.root / "out" / "weights" / "step_4" / "model.safetensors").read_bytes() == weights
