"""Search of learning rates on synthetic curves."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.command import run_here
from tests.setup.tuning.here import config_of

from buckeye.config.shared import TensorboardConfig, TrackioConfig, WandbConfig
from buckeye.config.trainer import LinearSchedulerConfig
from buckeye.setup.tuning import forks
from buckeye.setup.tuning.forks import Fork
from buckeye.setup.tuning.search import nearest_rate, search_by_change, search_by_score
from buckeye.setup.tuning.tune import Tuning

TARGET = 0.01


@given(st.floats(-9.0, 3.0), st.floats(1.5, 2.5), st.floats(-6.0, 0.0))
def test_search_by_change_reaches_a_distant_target(start, power, where):
    """The change grows as a power of the rate, is on target at 10^where, and is NaN above 1000 times that."""

    def change(rate):
        relative = rate / 10**where
        return math.nan if relative > 1e3 else min(2.0, TARGET * relative**power)

    found = search_by_change(change, 10 ** (where + start / 3), TARGET, tries=8, has_time=lambda: True)
    assert TARGET / 2 <= change(nearest_rate(found, TARGET)) <= TARGET * 2


def test_nearest_rate_is_the_smallest_if_all_break():
    found = search_by_change(lambda rate: math.nan, 1.0, TARGET, tries=3, has_time=lambda: True)
    assert list(found) == [1.0, pytest.approx(1 / 30), pytest.approx(1 / 900)]
    assert nearest_rate(found, TARGET) == min(found)
    assert list(search_by_change(lambda rate: 0.0, 1.0, TARGET, tries=2, has_time=lambda: True)) == [
        1.0,
        30.0,
    ]
    assert list(search_by_change(lambda rate: 0.0, 1.0, TARGET, tries=2, has_time=lambda: False)) == [1.0]


@given(st.integers(-4, 4))
def test_search_by_score_finds_the_best_rate_of_a_grid(best):
    found = search_by_score(lambda rate: -abs(math.log(rate, 3) - best), 1.0)
    assert round(math.log(max(found, key=found.get), 3)) == best
    tried = sorted(round(math.log(rate, 3)) for rate in found)
    assert {best - 1, best + 1} <= set(tried)  # a worse one on each side
    assert len(tried) == len(set(tried)) <= abs(best) + 3


@pytest.mark.parametrize(
    "words",
    [
        "--budget 10m",
        "@ run.toml --budget soon",
        "@ run.toml --budget",
        "@ run.toml --dry-run",
        "@ run.toml -o there",
    ],
)
def test_tune_refuses_invalid_arguments(tmp_path, words, wording):
    (tmp_path / "run.toml").write_text("max_steps = 2\n")
    (tmp_path / "there").mkdir()
    done = run_here("rl", "tune", *words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == wording
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml", "there"]


def test_forks_have_no_trackers(tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "_run_command", lambda argv, log, seconds: "not today")
    config = config_of(tmp_path / "run", tmp_path / "model", tmp_path / "env.py", lr=1e-3)
    logged = {"wandb": WandbConfig(), "trackio": TrackioConfig(), "tensorboard": TensorboardConfig()}
    config = config.model_copy(update=logged)
    fork = forks.train_fork(config, tmp_path / "one", 1e-4, 3, seconds=1.0)
    assert fork.failure_reason == "not today"
    made = json.loads((tmp_path / "one.json").read_text())
    assert [made[name] for name in logged] == [None, None, None]
    assert made["trainer"]["optim"]["lr"] == 1e-4


def test_reason_of_a_failed_fork_begins_with_its_last_error(tmp_path):
    printed = ["starting", "error: it broke", "  at x.py", "hint: do this", "  as follows", "more: explain"]
    argv = [sys.executable, "-c", f"print(*{printed}, sep='\\n'); raise SystemExit(2)"]
    assert forks._run_command(argv, tmp_path / "log", 30.0).startswith(
        "exit code 2: error: it broke   at x.py"
    )


def test_search_by_score_tries_lower_rates_after_a_failure():
    scores = {3e-3: -math.inf, 1e-3: 0.4, 1e-3 / 3: 0.2}
    found = search_by_score(
        lambda rate: next(value for known, value in scores.items() if known == pytest.approx(rate)), 3e-3
    )
    assert list(found) == pytest.approx([3e-3, 1e-3, 1e-3 / 3])
    left = iter([0.1, 0.2, None])  # without time no further rate is tried
    assert list(search_by_score(lambda rate: next(left), 1.0).values()) == [0.1, 0.2]
    assert search_by_score(lambda rate: None, 1.0) == {}


def fork(*steps):
    return Fork(rate=1e-3, directory=Path("fork"), seconds=1.0, rewards=[[step] * 8 for step in steps])


def test_score_weighs_the_second_half_more():
    assert fork(0.0, 0.1, 0.4, 0.6).score == pytest.approx((0.1 + 10 * 1.0) / 22)
    assert fork(0.1, 0.2, 0.4).score == pytest.approx((0.1 + 10 * 0.6) / 21)
    assert fork(0.0, 0.5, 1.0, 1.0).score > fork(0.0, 0.1, 1.0, 1.0).score  # as far, but sooner
    assert fork(0.0, 0.5, 0.6, 0.6).score < fork(0.0, 0.1, 0.6, 0.8).score  # sooner, but not as far
    assert not fork(0.0, 0.2, 0.4).lost_reward
    assert fork(0.0, 0.6, 0.4, 0.2).lost_reward


def test_fork_that_lost_reward_temporarily_is_excluded():
    assert fork(0.2, 0.9, 0.0, 0.1, 0.0, *[1.0] * 15).lost_reward
    assert not fork(0.2, 0.9, 0.0, 0.0, *[1.0] * 16).lost_reward  # two steps may be hard tasks
    assert not fork(0.2, 0.9, 0.3, 0.3, 0.3, *[1.0] * 15).lost_reward


@pytest.mark.parametrize(
    ("budget", "ends", "steps"),
    [(500.0, 60, 45), (500.0, 30, 30), (5000.0, None, 100), (60.0, 60, 12), (60.0, 4, 4)],
)
def test_fork_steps_fit_the_budget(tmp_path, monkeypatch, budget, ends, steps):
    monkeypatch.setattr(Tuning, "_left", lambda self: self.budget)
    config = config_of(tmp_path / "run", tmp_path / "model", tmp_path / "env.py", lr=1e-3)
    tuning = Tuning(
        config=config.model_copy(update={"max_steps": ends}),
        root=tmp_path / "tuned",
        budget=budget,
        tell=print,
    )
    still = replace(fork(0.1, 0.1, 0.1), seconds=16.0, step_seconds=2.0)
    assert tuning._fork_steps(still) == steps  # (500 / 5 - 10) / 2


@pytest.mark.parametrize(("steps", "scheduler"), [(40, "linear"), (12, "constant")])
def test_fork_as_long_as_the_run_keeps_its_scheduler(tmp_path, monkeypatch, steps, scheduler):
    monkeypatch.setattr(forks, "_run_command", lambda argv, log, seconds: "not today")
    config = config_of(tmp_path / "run", tmp_path / "model", tmp_path / "env.py", lr=1e-3, steps=40)
    falling = config.trainer.model_copy(update={"scheduler": LinearSchedulerConfig(decay=10)})
    config = config.model_copy(update={"trainer": falling})
    forks.train_fork(config, tmp_path / "one", 1e-4, steps, seconds=1.0)
    made = json.loads((tmp_path / "one.json").read_text())
    assert made["trainer"]["scheduler"]["type"] == scheduler
    assert made["trainer"]["max_steps"] == steps
