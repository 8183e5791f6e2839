"""Recorded configuration of a run, and detection of changes to it."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from buckeye.base.process import RunIdentity
from buckeye.config.load import load_config, to_json
from buckeye.config.rl import RLConfig
from buckeye.launch.changed_settings import (
    changed_settings,
    read_earlier_start,
    settings_history,
    to_recorded_form,
)
from buckeye.launch.heartbeats import Heartbeat
from buckeye.launch.plan import Role
from buckeye.launch.recorder import Recorder
from buckeye.launch.resume import make_resume_args
from buckeye.run_files.events import write_event
from buckeye.ui.endpoints import call_endpoint
from buckeye.ui.run_catalog import OpenRun
from tests.command import run_here
from tests.run.made_runs import made_run

RUN = "--trainer --orchestrator --inference --output-dir out --clean"


def config(words):
    return load_config(RLConfig, f"{RUN} {words}".split())


def record(directory, words):
    (directory / "configs").mkdir(parents=True, exist_ok=True)
    (directory / "configs" / "rl.json").write_text(to_json(to_recorded_form(config(words))))


def test_recorded_config_has_absolute_paths_of_local_models_only(tmp_path, monkeypatch):
    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    kept = to_recorded_form(config("--model.name models/base"))
    names = {part.model.name for part in (kept, kept.trainer, kept.orchestrator, kept.inference)}
    assert names == {str(tmp_path / "models" / "base")}
    assert to_recorded_form(config("--model.name models/other")).trainer.model.name == "models/other"


def test_changed_settings_lists_each_change_without_secrets(tmp_path, wording):
    env = '--orchestrator.env [{"id":"a","args":{"depth":1,"judge_token":"x"}},{"id":"b"}]'
    record(tmp_path, env)
    assert changed_settings(tmp_path, config(f"{env} --resume --output-dir elsewhere")) == []
    env = env.replace('"depth":1', '"depth":2').replace('"x"', '"y"').replace('"b"', '"c"')
    assert changed_settings(tmp_path, config(f"{env} --ckpt.interval 5 --trainer.optim.type sgd")) == wording


def test_changed_settings_ignores_settings_missing_in_older_versions(tmp_path):
    record(tmp_path, "")
    path = tmp_path / "configs" / "rl.json"
    recorded = json.loads(path.read_text())
    del recorded["supervision"], recorded["disk"], recorded["orchestrator"]["rollouts"]
    path.write_text(json.dumps(recorded))
    assert changed_settings(tmp_path, config("")) == []


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--clean true --x 1", "--x 1"),
        ("--clean=true --dry_run", ""),
        ("--resume yes @ run.toml", "@ run.toml"),
        ("--clean @ run.toml", "@ run.toml"),
        ("--trainer.ckpt.resume_step -1 --orchestrator.ckpt.resume-step=5 --x -1", "--x -1"),
        ("--ckpt.resume-step 5 --clean --no-dry-run", ""),
    ],
)
def test_make_resume_args_replaces_start_flags(words, kept):
    assert make_resume_args(words.split()) == [*kept.split(), "--resume"]


def ready_child():
    heartbeat = Heartbeat(pid=os.getpid(), progress=0, doing="a step", on=None, since=0.0, ready=True)
    return SimpleNamespace(
        key=(0, os.getpid()),
        role=Role(kind="trainer", index=0, argv=()),
        process=SimpleNamespace(pid=os.getpid()),
        heartbeats=SimpleNamespace(newest=heartbeat),
        stdout=Path("trainer.stdout"),
        is_local=True,
    )


def resume(directory, words, step):
    settings = config(f"--output-dir {directory} {words}")
    identity = RunIdentity(run_id="a" * 8, attempt=2)
    recorder = Recorder(settings, identity, (), step, earlier=read_earlier_start(directory))
    recorder.observe(SimpleNamespace(children=[ready_child()]))


def test_history_has_the_settings_of_all_steps(tmp_path):
    run = made_run(tmp_path / "out")
    record(run, "--trainer.optim.lr 1")
    assert settings_history(run) == []
    resume(run, "--trainer.optim.lr 1 --resume", 3)  # nothing changed
    assert settings_history(run) == []
    resume(run, "--trainer.optim.lr 2 --max-steps 9", 5)
    resume(run, "--trainer.optim.lr 3 --max-steps 9", 8)
    assert [(change.step, change.change) for change in settings_history(run)] == [
        (5, "trainer.optim.lr: 1.0 -> 2.0"),
        (5, "trainer.max_steps: null -> 9"),
        (8, "trainer.optim.lr: 2.0 -> 3.0"),
    ]


def test_history_leaves_out_invalid_events(tmp_path):
    write_event(tmp_path, "settings", attempt=2, step="5", changes="none")
    assert settings_history(tmp_path) == []


def test_compare_and_the_page_show_which_steps_ran_with_which_settings(tmp_path, monkeypatch, wording):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        made_run(tmp_path / name, run_id=f"{name * 8}")
    write_event(tmp_path / "a", "settings", attempt=2, step=4, changes=["trainer.optim.lr: 1 -> 0.5"])
    done = run_here("rl", "compare", "a", "b", cwd=tmp_path)
    assert [line for line in done.stdout.splitlines() if line.startswith("settings of")] == wording
    settings = call_endpoint(OpenRun("a", tmp_path / "a"), "settings", {})
    assert settings["changes"] == [{"step": 4, "change": "trainer.optim.lr: 1 -> 0.5"}]
