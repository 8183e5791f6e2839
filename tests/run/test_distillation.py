"""Two models of one tokenizer: the trained one teaches a fresh one, without its rewards."""

import pytest

from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from tests.ports import free_port
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory):
    """A model of twice the layers of `tiny_model`, with the same tokenizer."""
    size = TinySize(vocab_size=310, layers=2, hidden=64, max_length=128)
    texts = ["say 1 2 3 4 5 6 7 8 9 a b c d"] * 20
    folder = tmp_path_factory.mktemp("larger") / "tiny"
    make_tiny_model(folder, texts=texts, size=size, seed=1)
    return folder


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_a_trained_model_is_distilled_into_a_fresh_one(runner, larger_model):
    level = {"level": 0}
    runner.ok(runner.rl("teacher", "--model.name", larger_model, steps=25, **level))
    rewards = runner.metrics("teacher", "orchestrator")
    assert mean(rewards[s]["reward/mean"] for s in (22, 23, 24)) > 0.6
    port = free_port()
    weights = runner.root / "teacher" / "weights" / "step_25"
    server = runner.start(
        runner.argv(
            *("serve", "--model.name", weights, "--server.port", port),
            *("--server.host", "127.0.0.1", "--model.dtype", "float32"),
        )
    )
    try:
        words = (
            *("--orchestrator.teacher.model", weights),
            *("--orchestrator.teacher.base-url", f"http://127.0.0.1:{port}/v1"),
            *("--trainer.loss.type", "ppo", "--orchestrator.batch-size", 64),
        )
        done = runner.ok(runner.rl("student", *words, steps=30, **level))
    finally:
        server.terminate()
        server.communicate()
    measured = runner.metrics("student", "orchestrator")
    curve = [(s, r["teacher/kl"], r["reward/mean"], r["teacher/seconds"]) for s, r in measured.items()]
    print(curve)
    assert mean(kl for _, kl, _, _ in curve[-5:]) < 0.5 * mean(kl for _, kl, _, _ in curve[:5])
    assert mean(reward for _, _, reward, _ in curve[-5:]) > mean(r for _, _, r, _ in curve[:5]) + 0.2
    assert "advantages_misplaced" not in done.stdout


def test_a_teacher_that_ends_is_reported_with_its_deadline(runner):
    port = free_port()
    words = (
        *("--orchestrator.teacher.model", "none", "--orchestrator.teacher.timeout", 3),
        *("--orchestrator.teacher.base-url", f"http://127.0.0.1:{port}/v1"),
    )
    done = runner.run(runner.rl("out", *words, steps=1))
    assert done.returncode == 1
    assert "the teacher did not answer" in done.stdout + done.stderr
    wait_for(lambda: (runner.root / "out" / "status.json").exists())
