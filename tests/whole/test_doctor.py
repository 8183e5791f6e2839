"""`rl doctor` and the checks that `rl` makes itself, as users see them."""

from __future__ import annotations

import json
import shutil

import pytest


def doctor(runner, *words, output="out"):
    return runner.here(runner.argv("rl", "doctor", *runner.rl(output)[4:], *words))


def states(done) -> dict[str, str]:
    return {check["name"]: check["state"] for check in json.loads(done.stdout)}


@pytest.fixture
def broken_model(runner, tmp_path):
    """Model without its weights and its chat template."""
    directory = tmp_path / "broken"
    shutil.copytree(runner.model, directory)
    (directory / "model.safetensors").unlink()
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_the_machine_alone(runner):
    done = runner.here(runner.argv("rl", "doctor"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok      Python")
    assert any(line.startswith("ok      libraries") and "torch" in line for line in lines)
    assert lines[-1].endswith("skipped")
    assert not (runner.root / "outputs").exists()


def test_a_configuration(runner):
    done = doctor(runner, "--json")
    found = states(done)
    assert found["tokenizer"] == found["memory"] == found["disk"] == "ok"
    assert found["model"] == "warning"  # its weights are untrained
    assert found["environment letters.py"] in ("ok", "warning")
    assert found["group spread"] == "skipped"
    assert done.returncode == 0
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert any("optimizer (adamw)" in line for line in checks["memory"]["lines"])
    assert not (runner.root / "out").exists()


def test_what_is_broken_is_found_and_a_run_is_refused(runner, broken_model):
    letters = (runner.root / "letters.py").read_text()
    (runner.root / "raises.py").write_text(
        letters.replace("reply = await", "raise OSError('no tool')\n        reply = await")
    )
    words = ["--model.name", broken_model, "--orchestrator.env.0.id", "nowhere.py"]
    words += ["--orchestrator.env.1.id", "raises.py"]
    done = doctor(runner, *words)
    assert done.returncode == 1
    failed = {name for name, state in states(doctor(runner, "--json", *words)).items() if state == "failed"}
    assert failed == {"model", "tasks of nowhere", "environment raises.py"}
    refused = runner.here(runner.rl("out", "--model.name", broken_model))
    assert refused.returncode == 2
    assert "model.safetensors" in refused.stderr
    assert not (runner.root / "out").exists()


@pytest.mark.parametrize(("tokens", "state"), [(6, "warning"), (128, "failed"), (None, "failed")])
def test_a_reply_that_exceeds_the_positions_of_the_model_is_found(runner, tokens, state):
    words = (
        "--orchestrator.seq-len",
        256,
        "--trainer.seq-len",
        256,
        "--orchestrator.sampling.max-tokens",
        tokens,
    )
    assert states(doctor(runner, *words, "--json"))["model"] == state


def test_prompts_that_leave_no_room_are_found(runner):
    done = doctor(runner, "--orchestrator.seq-len", "8", "--trainer.seq-len", "64", "--json")
    assert done.returncode == 1
    assert states(done)["tasks of letters"] == "failed"


@pytest.mark.parametrize(
    "words", [("--sample", "few"), ("--sample", "4"), ("--trainer.optim.lrr", "1")], ids=" ".join
)
def test_usage(runner, words, wording):
    wrong = runner.here(runner.argv("rl", "doctor", *words))
    assert (wrong.returncode, wrong.stderr) == (2, wording)


@pytest.mark.slow
def test_a_sample_is_played_with_the_model(runner):
    done = doctor(runner, "--sample", "4", "--json")
    (check,) = [c for c in json.loads(done.stdout) if c["name"].startswith("group spread")]
    assert check["name"] == "group spread in letters"
    assert "groups of 4" in check["seen"]
    assert check["state"] in ("ok", "warning")
