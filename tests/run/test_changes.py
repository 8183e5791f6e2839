"""Recorded configuration of a run, and detection of changes to it."""

import json

import pytest

from buckeye.config.load import load_config, to_json
from buckeye.config.rl import RLConfig
from buckeye.launch.changed_settings import changed_settings, to_recorded_form
from buckeye.launch.resume import make_resume_args

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
