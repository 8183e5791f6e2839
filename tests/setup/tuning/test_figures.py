"""`rl tune` prints the values that it decides by; no fork runs here."""

import json
import shutil
import statistics

import pytest
from tests.command import check_json
from tests.setup.tuning.here import config_of

from buckeye.cli.typer_commands import run
from buckeye.setup.tuning import tune
from buckeye.setup.tuning.forks import Fork

AT_START = [[0.0, 0.1] * 8, [0.2, 0.3] * 8, [0.6, 0.8] * 8]  # its score weights the last step more


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Return `tuned(gain)`, the command's result for forks whose rewards rise by `gain` until the end."""

    def run(gain, budget=60.0):
        def train(config, directory, rate, steps, *, seconds):
            rewards = (
                AT_START
                if rate == tune._BASELINE_RATE
                else [[0.3 + gain * step / 11] * 8 for step in range(12)]
            )
            return Fork(rate=rate, directory=directory, seconds=1.0, step_seconds=0.1, rewards=rewards)

        monkeypatch.setattr(tune, "train_fork", train)
        monkeypatch.setattr(tune, "measure_policy_changes", lambda *_: [0.01])
        words = config_of(tmp_path / "run", tmp_path / "model", "env.py", lr=1e-3)
        told = []
        found = tune.Tuning(config=words, root=tmp_path / "tuned", budget=budget, tell=told.append).run()
        return found, told

    return run


@pytest.mark.parametrize(("gain", "learns"), [(0.6, True), (0.0, False)])
def test_result_shows_the_rewards_that_decided(tuned, gain, learns):
    found, told = tuned(gain)
    every = [reward for step in AT_START for reward in step]
    assert found.by_training is learns
    assert found.reward_at_start == pytest.approx(statistics.fmean(every))
    assert found.reward_at_end == pytest.approx(statistics.fmean([0.3 + gain * s / 11 for s in (9, 10, 11)]))
    (still,) = (line for line in told if line.startswith("still: "))
    assert f"reward_at_start {found.reward_at_start:.3g}" in still
    assert {fork["reward_at_end"] for fork in found.forks} == {found.reward_at_end}


def test_search_that_its_budget_ends_names_a_larger_budget(tuned, tmp_path, monkeypatch, capsys, wording):
    assert tuned(0.0)[0].enough_budget is None  # forks of 40 steps, as the run
    shutil.rmtree(tmp_path / "tuned")
    found, _ = tuned(0.6, budget=1e-3)
    assert (found.by_training, found.lr, found.forks) == (False, 1e-3, [])
    fork_seconds = 1.0 - 3 * 0.1 + 12 * 0.1
    assert found.enough_budget == pytest.approx(1.0 + 5 * fork_seconds * 40 / 12, rel=0.1)
    argv = ["@", str(tmp_path / "run" / "run.toml"), "--budget", "1s"]
    monkeypatch.setattr(tune.Tuning, "run", lambda self: found)
    assert run("rl tune", argv, "rl tune") == 0
    assert capsys.readouterr().out.splitlines()[:2] == wording


def test_tune_prints_the_rewards(tuned, tmp_path, monkeypatch, capsys, wording):
    argv = ["@", str(tmp_path / "run" / "run.toml"), "--output", str(tmp_path / "tuned")]
    found, _ = tuned(0.6)
    monkeypatch.setattr(tune.Tuning, "run", lambda self: found)
    assert run("rl tune", argv, "rl tune") == 0
    assert capsys.readouterr().out.splitlines()[1] == wording
    assert run("rl tune", [*argv, "--json"], "rl tune") == 0
    out = capsys.readouterr().out
    check_json(["rl", "tune", "--json"], out)
    assert json.loads(out)["reward_at_end"] == found.reward_at_end
