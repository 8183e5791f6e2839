"""A whole run, logged in Weights & Biases and exported."""

import json
import re

import pytest
from transformers import AutoModelForCausalLM

from tests.monitor.wandb_file import config as logged_config
from tests.monitor.wandb_file import history


def test_a_run_that_could_not_be_logged_does_not_start(runner):
    runner.env |= {"NETRC": "none", "WANDB_API_KEY": ""}
    refused = runner.here(runner.rl("out", "--wandb"))
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: wandb: no key for Weights & Biases.")
    assert not (runner.root / "out").exists()


@pytest.mark.slow
def test_a_run_in_wandb_and_as_a_model(runner):
    words = ("--wandb.offline", "--wandb.log-extras.interval", 2, "--ckpt.interval", 2)
    words += ("--orchestrator.eval.env", '[{"id": "letters.py", "num_examples": 6}]')
    words += ("--orchestrator.eval.interval", 2, "--orchestrator.eval.rollouts-per-example", 2)
    runner.env["JUDGE_API_KEY"] = "correct-horse-battery"
    done = runner.run(runner.rl("out", *words))
    assert done.returncode == 0, done.stderr + done.stdout
    (file,) = (runner.root / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    run_id = json.loads((runner.root / "out" / "run.json").read_text())["run_id"]
    assert file.name == f"run-{run_id}.wandb"
    rows = list(history(file))
    for process, name in (("trainer", "loss"), ("orchestrator", "reward/mean"), ("trainer", "idle_ratio")):
        expected = {step: r[name] for step, r in runner.metrics("out", process).items()}
        assert {r["step"]: r[f"{process}/{name}"] for r in rows if f"{process}/{name}" in r} == expected
        assert sorted(expected) == [0, 1, 2, 3]
    assert sum("samples" in r or "samples/_type" in r for r in rows) == 2
    assert logged_config(file)["trainer"]["max_steps"] == 4
    times = runner.metrics("out", "orchestrator")[2]
    assert 0 <= times["sampler/idle_ratio"] <= 1
    assert times["sampler/tokens_per_second"] > 0
    assert times["time/rollout/sampling/mean"] + times["time/rollout/environment/mean"] == pytest.approx(
        times["time/rollout/mean"]
    )
    for record in runner.metrics("out", "trainer").values():  # without advantages nothing is computed
        assert (record["gflops_per_second"] > 0) == (record["trained_tokens"] > 0)

    exported = runner.run(runner.argv("export", "out", "-o", "model"))
    assert exported.returncode == 0, exported.stderr
    # In an asynchronous run an evaluation may be of the weights one step beside the checkpoint's.
    assert re.match(r"step [24]: the best of [12] evaluated checkpoints by mean reward", exported.stdout)
    AutoModelForCausalLM.from_pretrained(runner.root / "model")
    again = runner.run(runner.argv("export", "out", "-o", "model"))
    assert (again.returncode, "nothing is overwritten" in again.stderr) == (2, True)
