"""Weights & Biases with the real library, offline: logged data, omitted data, and failures."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import wandb

from buckeye.base.distribution import install_command
from buckeye.config.load import load_with_warnings
from buckeye.config.rl import RLConfig
from buckeye.config.shared import TensorboardConfig, TrackioConfig, WandbConfig
from buckeye.errors import UsageError
from buckeye.monitor.metrics import MetricsLog
from buckeye.monitor.tracker import Tracker, step_values
from buckeye.monitor.tracker_threads import check_trackers, log_to_trackers
from tests.monitor.wandb_file import config as logged_config
from tests.monitor.wandb_file import history

RUN = "--trainer --orchestrator --orchestrator.rollouts-per-example 8 --output-dir"
WORDS = "--wandb.offline --wandb.project p --wandb.name n --wandb.log-extras.interval 2"
SECRETS = ("correct-horse-battery", "hunter2-in-an-argument", "header-of-a-client")


@pytest.fixture(autouse=True)
def _no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def said(caplog):
    """Return the messages of Buckeye's loggers."""
    return [record.message for record in caplog.records if record.name.startswith("buckeye")]


def log_run(directory, settings):
    """Log an existing record to one tracker."""
    with log_to_trackers([settings], output_dir=directory, run_id="abc", config=settings):
        pass


def _write_rollouts(directory, step):
    rollout = {"group": 0, "env": "letters", "task_id": "t", "stop_reason": "stop", "error": None}
    lines = [
        json.dumps({**rollout, "reward": i / 4, "completion_tokens": i, "text": [f"say {i}", "yes" * 2000]})
        for i in range(5)
    ]
    directory.mkdir(exist_ok=True)
    (directory / f"step_{step}.jsonl").write_text("\n".join(lines))


@pytest.mark.e2e
def test_one_run_with_the_numbers_of_all_processes_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", SECRETS[0])
    args = {"judge": SECRETS[0], "judge_token": SECRETS[1], "headers": {"X-Key": SECRETS[2]}}
    env = json.dumps([{"id": "letters", "args": args}])
    argv = [*f"{RUN} {tmp_path} {WORDS}".split(), "--orchestrator.env", env]
    config, _ = load_with_warnings(RLConfig, argv)
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    for attempt in range(2):  # the second attempt continues after the first
        with log_to_trackers([config.wandb], output_dir=tmp_path, run_id="abc", config=config):
            for step in range(2 * attempt, 2 * attempt + 2):
                _write_rollouts(tmp_path / "rollouts", step)
                metrics.write("orchestrator", step, {"reward/mean": step / 4})
                metrics.write("trainer", step - 1, {"loss": 1 / step}) if step else None  # lags behind
        time.sleep(1.1)  # the library names a directory by the second
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-abc.wandb"))
    assert len(files) == 2
    rows = [list(history(path)) for path in files]
    assert [
        [(r["step"], r.get("trainer/loss"), r.get("orchestrator/reward/mean")) for r in part] for part in rows
    ] == [
        [(0, 1.0, 0.0), (1, None, 0.25)],
        [(1, 0.5, None), (2, 1 / 3, 0.5), (3, None, 0.75)],
    ]
    extras = [
        sorted({name.partition("/")[0] for name in row} & {"samples", "distributions"}) for row in rows[0]
    ]
    assert extras == [["distributions", "samples"], []]
    (table,) = files[0].parent.glob("files/media/table/samples_*.json")
    content = json.loads(table.read_text())
    assert content["columns"][0] == "env"
    assert content["data"][4][2] == 1.0
    assert content["data"][4][-1].endswith("... (2007 more characters)")
    logged = logged_config(files[0])
    assert logged["trainer"]["optim"]["type"] == "adamw"
    assert logged["orchestrator"]["env"][0]["args"]["headers"] == {"X-Key": "(redacted)"}
    for path in (tmp_path / "wandb").rglob("*"):
        if path.is_file():
            assert not [s for s in SECRETS if s.encode() in path.read_bytes()], path


@pytest.mark.e2e
def test_what_a_killed_launcher_may_have_lost_is_sent_again(tmp_path):
    code = f"""
import os, time
from pathlib import Path
from buckeye.config.shared import TensorboardConfig, TrackioConfig, WandbConfig
from buckeye.monitor.tracker_threads import log_to_trackers
settings, out = WandbConfig(offline=True), Path({str(tmp_path)!r})
with log_to_trackers([settings], output_dir=out, run_id="abc", config=settings):
    while not list(out.glob("wandb/offline-run-*/run-abc.wandb")):
        time.sleep(0.05)
    time.sleep(1.5)
    os._exit(9)
"""
    MetricsLog(tmp_path / "metrics.jsonl").write("trainer", 0, {"loss": 1.0})
    env = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # not ours
    assert subprocess.run([sys.executable, "-c", code], check=False, env=env).returncode == 9
    log_run(tmp_path, WandbConfig(offline=True))
    newest = max(tmp_path.glob("wandb/offline-run-*/run-abc.wandb"))
    assert list(history(newest)) == [{"step": 0, "trainer/loss": 1.0}]


@pytest.fixture
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("buckeye"), "propagate", True)
    return caplog


@pytest.mark.e2e
def test_without_the_server_the_numbers_are_on_the_disk(tmp_path, monkeypatch, warnings, wording):
    init = wandb.init

    def refuse_online(*, mode, **arguments):
        if mode == "online":
            raise wandb.errors.CommError("no such project")
        return init(mode=mode, **arguments)

    monkeypatch.setattr(wandb, "init", refuse_online)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    MetricsLog(tmp_path / "metrics.jsonl").write("trainer", 0, {"loss": 1.0})
    log_run(tmp_path, WandbConfig())
    assert said(warnings) == wording
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-abc.wandb")
    assert list(history(file)) == [{"step": 0, "trainer/loss": 1.0}]


def test_a_run_that_could_not_be_logged_is_refused_before_it_starts(tmp_path, monkeypatch, refusal):
    with refusal(UsageError):
        check_trackers([WandbConfig()])
    check_trackers([])
    check_trackers([WandbConfig(offline=True)])
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / "netrc").chmod(0o600)
    check_trackers([WandbConfig()])
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with refusal(UsageError):
        check_trackers([WandbConfig()])
    monkeypatch.setenv("WANDB_API_KEY", "x")
    check_trackers([WandbConfig()])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError) as caught:
        check_trackers([WandbConfig(offline=True)])
    assert install_command("wandb") in str(caught.value)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    check_trackers([WandbConfig()])


def test_what_a_tracker_does_not_take_is_told_once_counted_and_sent_again(
    tmp_path, monkeypatch, warnings, wording
):
    taken = []

    class Fickle(Tracker):
        title, folder = "Fickle", "trackio"
        broken = True

        def log(self, step):
            if self.broken and step.number != 1:
                raise OSError(f"no room for {step.number}\nand more")
            taken.append((step.number, step_values(step)))

    monkeypatch.setattr("buckeye.monitor.tracker_threads.tracker_class", lambda _: Fickle)
    monkeypatch.setattr("buckeye.monitor.tracker_threads.need", lambda *_: None)
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(4):
        metrics.write("sft", step, {"loss": step / 2})
    for broken in (True, False):
        Fickle.broken = broken
        log_run(tmp_path, TrackioConfig())
    assert said(warnings) == wording
    assert taken == [(1, {"sft/loss": 0.5}), *((n, {"sft/loss": n / 2}) for n in range(4))]


def test_one_tracker_that_fails_leaves_the_others(tmp_path, monkeypatch, warnings, wording):
    taken = []

    class Good(Tracker):
        title, folder = "Good", "tensorboard"

        def log(self, step):
            taken.append(step.number)

    class Bad(Tracker):
        title, folder = "Bad", "trackio"

        def begin(self):
            raise ValueError("no such place")

    found = {TensorboardConfig: Good, TrackioConfig: Bad}
    monkeypatch.setattr("buckeye.monitor.tracker_threads.tracker_class", lambda one: found[type(one)])
    MetricsLog(tmp_path / "metrics.jsonl").write("sft", 0, {"loss": 1.0})
    settings = [TrackioConfig(), TensorboardConfig()]
    with (
        pytest.raises(KeyError),
        log_to_trackers(settings, output_dir=tmp_path, run_id="a", config=settings[0]),
    ):
        raise KeyError("the run's own")
    assert taken == [0]
    assert said(warnings) == wording


class _Stuck(Tracker):
    title, folder = "Stuck", "stuck"
    go_on = threading.Event()

    def begin(self):
        self.go_on.wait()


def test_what_a_tracker_that_hangs_has_not_taken_is_named(tmp_path, monkeypatch, warnings, wording):
    monkeypatch.setattr("buckeye.monitor.tracker_threads.tracker_class", lambda one: _Stuck)
    monkeypatch.setattr("buckeye.monitor.tracker_threads._FINISH_SECONDS", 0.1)
    log_run(tmp_path, TrackioConfig())
    _Stuck.go_on.set()
    assert said(warnings) == wording
