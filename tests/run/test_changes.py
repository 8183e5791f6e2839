"""Recorded configuration of a run, and detection of changes to it."""

import json

import pytest

from buckeye.config.load import load_config, to_json
from buckeye.config.rl import RLConfig
from buckeye.launch.changed_settings import (
    changed_settings,
    former_configs,
    record_config,
    settings_history,
    to_recorded_form,
)
from buckeye.launch.resume import make_resume_args
from buckeye.runs.fork import fork_run
from buckeye.ui.endpoints import call_endpoint
from buckeye.ui.run_catalog import OpenRun
from tests.command import run_here
from tests.run.made_runs import made_run

RUN = "--trainer --orchestrator --inference --output-dir out --clean"


def config(words):
    return load_config(RLConfig, f"{RUN} {words}".split())


def record(directory, words):
    (directory / "configs").mkdir(parents=True)
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


def rates(directory):
    return [(change.step, change.key, change.old, change.new) for change in settings_history(directory)]


def start(directory, monkeypatch, words, since):
    monkeypatch.chdir(directory)
    record_config(config(words), since=since)
    return directory / "out"


def test_history_has_the_settings_of_all_steps(tmp_path, monkeypatch):
    run = start(tmp_path, monkeypatch, "--trainer.optim.lr 1", None)
    assert rates(run) == []
    start(tmp_path, monkeypatch, "--trainer.optim.lr 1 --resume", 3)  # nothing changed
    assert (rates(run), former_configs(run)) == ([], {})
    start(tmp_path, monkeypatch, "--trainer.optim.lr 2 --max-steps 9", 5)
    assert rates(run) == [(5, "trainer.optim.lr", 1.0, 2.0), (5, "trainer.max_steps", None, 9)]
    start(tmp_path, monkeypatch, "--trainer.optim.lr 3 --max-steps 9", 8)
    first, second = former_configs(run).values()
    assert [json.loads(path.read_text())["trainer"]["optim"]["lr"] for path in (first, second)] == [1.0, 2.0]
    assert [(change[0], change[3]) for change in rates(run)] == [(5, 2.0), (5, 9), (8, 3.0)]


@pytest.mark.parametrize(
    ("since", "history"),
    [(8, [(5, 1.0, 2.0), (8, 2.0, 4.0)]), (5, [(5, 1.0, 4.0)]), (2, [(2, 1.0, 4.0)]), (0, [])],
)
def test_history_forgets_the_steps_that_a_resume_discards(tmp_path, monkeypatch, since, history):
    for rate, step in ((1, None), (2, 5), (3, 8), (4, since)):
        run = start(tmp_path, monkeypatch, f"--trainer.optim.lr {rate}", step)
    assert [(step, old, new) for step, _, old, new in rates(run)] == history


def test_history_of_damaged_files_is_empty(tmp_path, monkeypatch):
    run = start(tmp_path, monkeypatch, "--trainer.optim.lr 1", None)
    start(tmp_path, monkeypatch, "--trainer.optim.lr 2", 5)
    (run / "configs" / "rl_before_step_5.json").write_text("{")
    (run / "configs" / "rl_before_step_x.json").write_text("{}")
    assert rates(run) == []


def test_compare_and_the_page_show_which_steps_ran_with_which_settings(tmp_path, monkeypatch, wording):
    for name, later in (("a", "0.5"), ("b", "1")):
        made_run(tmp_path / name, run_id=f"{name * 8}")
        words = f"--output-dir {name} --trainer.optim.lr"
        start(tmp_path, monkeypatch, f"{words} 1", None)
        start(tmp_path, monkeypatch, f"{words} {later}", 4)
    done = run_here("rl", "compare", "a", "b", cwd=tmp_path)
    assert [line for line in done.stdout.splitlines() if line.startswith("settings of")] == wording
    settings = call_endpoint(OpenRun("a", tmp_path / "a"), "settings", {})
    assert settings["changes"] == [{"step": 4, "key": "trainer.optim.lr", "old": 1.0, "new": 0.5}]


@pytest.mark.parametrize(("step", "changed"), [("10", 5), ("5", 5), ("3", 3)])
def test_fork_keeps_the_history_of_its_steps(tmp_path, monkeypatch, step, changed):
    run = made_run(tmp_path / "out", checkpoints=(3, 5, 10))
    for rate, since in ((1, None), (2, 5), (3, 20)):
        start(tmp_path, monkeypatch, f"--trainer.optim.lr {rate}", since)
    forked = fork_run(run, step=step, target=tmp_path / "forked")
    assert min(former_configs(forked)) == changed
    assert max(former_configs(forked)) <= int(step)


@pytest.mark.parametrize(("step", "later"), [(20, []), (5, ["trainer.optim.lr"])])
def test_fork_names_settings_of_a_later_start(tmp_path, monkeypatch, wording, step, later):
    made_run(tmp_path / "out", checkpoints=(5, 20))
    for rate, since in ((1, None), (2, 10)):
        start(tmp_path, monkeypatch, f"--trainer.optim.lr {rate}", since)
    printed = run_here("rl", "fork", "out", "--step", step, cwd=tmp_path).stdout.splitlines()
    assert printed[1:-1] == wording
    words = ("rl", "fork", "out", "--step", step, "-o", "other", "--json")
    found = json.loads(run_here(*words, cwd=tmp_path).stdout)["later_settings"]
    assert [change["key"] for change in found] == later
