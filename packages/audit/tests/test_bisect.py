"""`rl bisect` as its user meets it, on a run of 5 steps in lockstep that began with its model."""

import json
import shutil

import pytest
from tests.command import run_here

from buckeye.errors import UsageError
from buckeye.orchestrator import batch
from buckeye.trainer import batch_loss
from buckeye.trainer.optim.optimizer import NamedOptimizer
from buckeye_audit.replay.bisect import departure


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    shutil.copytree(finished.root / "out", tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def bisect(run, *words):
    """The exit code, and what was found."""
    done = run_here("rl", "bisect", run.name, *words, "--json", cwd=run.parent)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def first_taught(run):
    """The first step of which some rollout has an advantage."""
    steps = [(run / f"rollouts/step_{step}.jsonl").read_text().splitlines() for step in range(5)]
    return next(
        n for n, lines in enumerate(steps) if any(any(json.loads(one)["advantages"]) for one in lines)
    )


def place(found):
    return found["step"], found["stage"], found["replays"]


def test_unchanged_code_computes_the_same(run):
    code, found = bisect(run, "--good", "0", "--bad", "4")
    assert (code, place(found)) == (0, (None, None, 1))
    assert (found["not_looked_at"], found["as_recorded"]) == ([], [])
    said = run_here("rl", "bisect", "run", cwd=run.parent)
    assert said.stdout == "Steps 0 to 4: nothing differs from what was recorded (1 replay).\n"


def test_the_step_and_the_stage_are_named(run, monkeypatch):
    step, rates = NamedOptimizer.step, []

    def faster_from_the_third(self, rate):
        rates.append(rate)
        return step(self, rate * (1.5 if len(rates) > 2 else 1.0))

    with monkeypatch.context() as patched:
        patched.setattr(NamedOptimizer, "step", faster_from_the_third)
        assert place(bisect(run, "--good", "0")[1]) == (2, "weights", 1)
    made = batch.batch_advantages

    def turned(*given):
        return [[[-a for a in turns] for turns in group] for group in made(*given)]

    monkeypatch.setattr(batch, "batch_advantages", turned)
    code, found = bisect(run)
    assert (code, place(found)) == (1, (first_taught(run), "advantages", 1))
    told = [one for one in found["replay"]["comparisons"] if one["difference"] != 0.0]
    assert [(one["stage"], "group" in one["where"]) for one in told] == [("advantages", True)]


def test_other_settings(run):
    said = run_here("rl", "bisect", "run", "--with", "trainer.optim.lr=0.02", "--good", "1", cwd=run.parent)
    assert said.returncode == 1
    assert "The first difference is in step 0: weights, not the same (1 replay)." in said.stdout
    assert "So steps up to 1 are not all right, as --good says." in said.stdout
    found = bisect(run, "--with", "orchestrator.advantage.std_norm=local")[1]
    assert place(found)[:2] == (first_taught(run), "advantages")
    assert place(bisect(run, "--with", "orchestrator.reward_shaping.length_penalty=1")[1])[1] == "rewards"


def test_another_chat_template(run, finished):
    model = shutil.copytree(finished.model, run.parent / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>\n", "<|im_end|>"))
    assert template.read_text() != (finished.model / "chat_template.jinja").read_text()
    found = bisect(run, "--with", f"orchestrator.model.name={model}")[1]
    assert place(found)[:2] == (0, "tokens")


def test_a_metric_that_departs(run):
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in metrics if record["process"] == "trainer"]
    expected = departure(dict(enumerate(losses)), 1, 4)
    said = run_here("rl", "bisect", "run", "--metric", "loss", "--good", "1", "--bad", "4", cwd=run.parent)
    assert said.returncode == 0, said.stderr
    assert f"Step {expected}: nothing differs from what was recorded (1 replay)." in said.stdout
    assert departure({0: 1.0, 1: 5.0, 2: 1.2, 3: 4.0, 4: 4.5, 5: 5.0}, 0, 5) == 3  # the spike at 1 is none
    with pytest.raises(UsageError, match="does not depart"):
        departure({0: 1.0, 3: 1.0}, 0, 3)


def test_what_was_played_is_gone(run):
    for step in (0, 1):
        (run / f"rollouts/step_{step}.jsonl").unlink()
    code, found = bisect(run, "--with", "orchestrator.advantage.std_norm=local", "--good", "0", "--bad", "1")
    assert (code, found["as_recorded"]) == (0, [0, 1])


def test_weights_alone_lead_to_the_gradient(run, monkeypatch):
    settings = run / "configs/trainer.json"
    content = json.loads(settings.read_text())
    content["model"]["name"] = "gone"
    settings.write_text(json.dumps(content))
    shutil.rmtree(run / "checkpoints")
    there = sorted(int(path.name[5:]) for path in (run / "weights").iterdir() if path.name != "step_5")
    code, found = bisect(run)
    assert (code, found["step"]) == (0, None)
    assert found["not_looked_at"] == [step for step in range(5) if step not in there]
    total_loss = batch_loss.total_loss

    def with_the_wrong_sign(inputs, loss):
        inputs.advantages.neg_()
        return total_loss(inputs, loss)

    monkeypatch.setattr(batch_loss, "total_loss", with_the_wrong_sign)
    assert bisect(run)[1]["stage"] == "loss"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--good", "4", "--bad", "2"), "--good 4 is not before --bad 2."),
        (("--good", "0", "--bad", "9"), "There are those of steps 0 to 4."),
        (("--good", "7"), "--good 7 is not before step 4"),
        (("--with", "lr=1"), "a setting is written as trainer.NAME=VALUE or orchestrator.NAME=VALUE."),
        (("--with", "trainer.optim.learning=1"), "optim.learning"),
        (("--metric", "los", "--good", "0"), "there is no such number. Did you mean loss"),
        (("--metric", "loss", "--bad", "9"), "no value at step 9. There are values of steps 0 to 4."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(finished, words, message):
    done = run_here("rl", "bisect", "out", *words, cwd=finished.root)
    assert done.returncode == 2
    assert message in done.stderr


def test_no_batch_was_kept(run):
    shutil.rmtree(run / "trained")
    done = run_here("rl", "bisect", "run", cwd=run.parent)
    assert done.returncode == 2
    assert "None is: see trainer.trained in the settings of the run." in done.stderr
