"""Flags of `buckeye rl` that change what a run is made of, and an empty folder without a terminal."""

import json
import sys

import pytest
from tests.setup.recipe.rl_project import fill, task

from buckeye.cli import main
from buckeye.errors import UsageError
from buckeye.setup.recipe.flags import read_words


@pytest.fixture
def rl(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder: (exit code, stdout, stderr)."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("buckeye.launch.preflight.devices._visible_gpus", tuple)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["rl", *words])
        with pytest.raises(SystemExit) as ended:
            main.rl()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    run.folder = folder
    return run


def test_no_eval_leaves_the_evaluation_out_and_says_so(rl):
    fill(rl.folder)
    held_out = [task(i, metadata={"split": "eval"}) for i in (4, 5)]
    (rl.folder / "tasks.json").write_text(json.dumps([*(task(i) for i in range(4)), *held_out]))
    with_it = json.loads(rl("--dry-run", "--json")[1])
    without = json.loads(rl("--dry-run", "--json", "--no-eval")[1])
    assert "[orchestrator.eval]" in with_it["text"]
    assert "[orchestrator.eval" not in without["text"]
    assert without["tasks"].startswith("4 to train on, 2 held out, without evaluation")
    _, shown, _ = rl("--dry-run", "--no-eval")
    assert "4 to train on, 2 held out, without evaluation" in " ".join(shown.split())


def test_a_run_without_end_says_so(rl):
    fill(rl.folder)
    _, shown, _ = rl("--dry-run", "--max-steps", "None")
    assert "steps        without end" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--no-eval", "--orchestrator.eval.interval", "4"),
            "--orchestrator.eval.interval sets an evaluation",
        ),
        (("--no-eval", "--orchestrator.eval"), "--orchestrator.eval sets an evaluation"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(words, says):
    with pytest.raises(UsageError, match=says):
        read_words(words).check_for_parts()


def test_flags_of_a_run_put_together_here_are_refused_with_a_file():
    with pytest.raises(UsageError, match="--no-eval is for a run that is put together here"):
        read_words(["@", "run.toml", "--no-eval"]).plain_settings()
    assert read_words(["--provider", "ssh", "--host", "me@there", "--max-hours", "2"]).flags.max_hours == 2


def test_an_empty_folder_is_told_what_is_missing_in_order_and_stays_empty(rl):
    for more in ((), ("--yes",), ("--json",), ("--dry-run",), ("--quiet",)):
        code, out, err = rl(*more)
        assert (code, out) == (2, "")
        assert "there is no configuration of an environment here" in err
        for command in ("buckeye rl init my-env:latest", "buckeye rl --config", "buckeye env new my-env"):
            assert command in err
    assert list(rl.folder.iterdir()) == []
    fill(rl.folder)
    (rl.folder / "tasks.json").unlink()
    assert "there are no tasks here (tasks.json). Add --dataset" in rl()[2]


def test_a_model_that_is_not_whole_is_refused(rl):
    fill(rl.folder)
    weights, description = rl.folder / "tiny" / "model.safetensors", rl.folder / "tiny" / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:20])
    code, _, err = rl("--dry-run", "--model", "tiny")
    assert (code, "tiny/model.safetensors is no whole safetensors file" in err) == (2, True)
    weights.write_bytes(whole)
    description.write_text(description.read_text()[:9])
    code, _, err = rl("--dry-run", "--model", "tiny")
    assert (code, "tiny/config.json cannot be read" in err) == (2, True)
