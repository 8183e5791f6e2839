"""`rl tune` on small tasks: real forks, from learning rates that are far too high and far too low."""

import json
import statistics
import tomllib

import pytest
import torch
from packages.audit.tests.diagnosis.small_runs import ENVIRONMENT, warm_model
from packages.audit.tests.tuning.here import RUN, config_of, play
from tests.command import run_here

from buckeye import runs
from buckeye_audit.tuning import forks
from buckeye_audit.tuning.forks import Forks, Origin
from buckeye_audit.tuning.tune import Tuning

pytestmark = pytest.mark.slow

LETTERS = "text[:3].count('a') / 3"


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield warm_model(tmp_path_factory.mktemp("warm"))
    torch.set_num_threads(threads)


def environment(folder, reward):
    env = folder / "words.py"
    env.write_text(ENVIRONMENT.format(prompt="say {number}", late=0, reward=reward))
    return env


@pytest.mark.parametrize("start", [0.15, 0.00016])
def test_from_thirty_times_too_high_or_too_low_it_reaches_the_target(tmp_path, warm, monkeypatch, start):
    monkeypatch.setattr(forks, "_carry_out", play)
    env, told = environment(tmp_path, LETTERS), []
    tuning = Tuning(
        config=config_of(tmp_path / "run", warm, env, lr=start),
        origin=Origin(),
        root=tmp_path / "tuned",
        budget=3600.0,
        steps=12,
        tell=told.append,
    )
    found = tuning.run()
    assert found.sure
    written = tomllib.loads(found.file.read_text())
    assert written["trainer"]["optim"]["lr"] == pytest.approx(found.rate, rel=1e-3)
    events = [json.loads(line)["what"] for line in (tmp_path / "tuned" / "events.jsonl").open()]
    assert events[:2] == ["begin", "still"]
    assert events[-1] == "chosen"
    made = Forks(config=config_of(tmp_path / "run", warm, env, lr=start), origin=Origin(), root=tmp_path)
    done = made.play("again", found.rate, 20, seconds=3600.0)
    rewards = [step.reward for step in runs.open(done.directory).steps if step.reward is not None]
    assert statistics.fmean(rewards[-3:]) > 0.95


def test_the_command(tmp_path, warm):
    """From the words to the file, with forks that are processes."""
    values = {"folder": tmp_path, "model": warm, "env": environment(tmp_path, LETTERS), "lr": 5e-3}
    (tmp_path / "run.toml").write_text(RUN.format(**values, steps=40, batch=16, seed=0))
    done = run_here("rl", "tune", "@", "run.toml", "--steps", "4", "--budget", "20m", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["file"] == str(tmp_path / "out-tune" / "tuned.toml")
    assert all(fork["why"] == "" for fork in found["forks"])
    again = run_here("rl", "@", "run.toml", "@", found["file"], "--dry-run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
