"""`rl tune` on small tasks: real forks, from learning rates that are far too high and far too low."""

import json
import statistics
import tomllib
from pathlib import Path

import pytest
import torch
from tests.analysis.diagnosis.small_runs import ENVIRONMENT, warm_model
from tests.command import run_here
from tests.setup.tuning.here import RUN, config_of, play

from buckeye import runs
from buckeye.setup.tuning import forks
from buckeye.setup.tuning.tune import Tuning

pytestmark = pytest.mark.slow

LETTERS = "text[:3].count('a') / 3"


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUCKEYE_THREADS", "1")  # two threads that wait for each other are slow on busy cores
        yield warm_model(tmp_path_factory.mktemp("warm"))
    torch.set_num_threads(threads)


def environment(folder, reward):
    env = folder / "words.py"
    env.write_text(ENVIRONMENT.format(prompt="say {number}", late=0, reward=reward))
    return env


@pytest.mark.parametrize("start", [0.15, 0.00016])
def test_tuning_reaches_the_target_from_distant_rates(tmp_path, warm, monkeypatch, start):
    monkeypatch.setattr(forks, "_run_command", play)
    env, told = environment(tmp_path, LETTERS), []
    tuning = Tuning(
        config=config_of(tmp_path / "run", warm, env, lr=start),
        root=tmp_path / "tuned",
        budget=3600.0,
        tell=told.append,
    )
    found = tuning.run()
    assert found.by_training
    written = tomllib.loads(Path(found.file).read_text())
    assert written["trainer"]["optim"]["lr"] == pytest.approx(found.lr, rel=1e-3)
    events = [json.loads(line)["what"] for line in (tmp_path / "tuned" / "events.jsonl").open()]
    assert events[:2] == ["begin", "still"]
    assert events[-1] == "chosen"
    config = config_of(tmp_path / "run", warm, env, lr=start)
    done = forks.train_fork(config, tmp_path / "again", found.lr, 20, seconds=3600.0)
    rewards = [step.reward for step in runs.open(done.directory).steps if step.reward is not None]
    assert statistics.fmean(rewards[-3:]) > 0.95


def test_the_command(tmp_path, warm):
    values = {"folder": tmp_path, "model": warm, "env": environment(tmp_path, LETTERS), "lr": 5e-3}
    (tmp_path / "run.toml").write_text(RUN.format(**values, steps=40, batch=16, seed=0))
    done = run_here(
        "rl", "tune", "@", "run.toml", "--max-steps", "4", "--budget", "20m", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["file"] == str(tmp_path / "out-tune" / "tuned.toml")
    assert all(fork["why"] == "" for fork in found["forks"])
    again = run_here("rl", "@", "run.toml", "@", found["file"], "--dry-run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
