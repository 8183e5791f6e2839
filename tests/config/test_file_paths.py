"""Paths in a configuration file: relative to the file if they exist there."""

import json

import pytest

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working directory with a folder `conf`, both with data, and `conf` with an environment."""
    for place in (tmp_path, tmp_path / "conf"):
        (place / "data").mkdir(parents=True)
        (place / "both.jsonl").write_text("{}\n")
    for name in (
        "conf/prompts.jsonl",
        "conf/reward.py",
        "conf/schema.json",
        "conf/judge.toml",
        "conf/my_env.py",
        "here.jsonl",
    ):
        (tmp_path / name).write_text("")
    (tmp_path / "conf" / "project").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "conf"


def environments(folder, env, *words, section="orchestrator", file="run.json"):
    value = {"env": env}
    (folder / file).write_text(json.dumps({section: value} if section else value))
    config = load_config(RLConfig, [*words, "@", f"conf/{file}"])
    return [(one.id, one.args) for one in config.orchestrator.env]


def test_data_and_rewards_are_searched_next_to_the_file(folder):
    rewards = ["reward.py:f", "exact", "json:schema.json", "judge:judge.toml", "package.module:f", "other.py"]
    args = {
        "path": "prompts.jsonl",
        "eval_path": "here.jsonl",
        "reward": [*rewards, "~nobody-here/reward.py"],
        "answer_column": "prompts.jsonl",
    }
    ((env_id, found),) = environments(folder, [{"id": "dataset", "args": args}])
    assert env_id == "dataset"
    assert found == args | {
        "path": "conf/prompts.jsonl",
        "reward": [
            *("conf/reward.py:f", "exact", "json:conf/schema.json", "judge:conf/judge.toml"),
            *("package.module:f", "other.py", "~nobody-here/reward.py"),
        ],
    }


def test_tilde_is_the_home_directory(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (folder / "run.toml").write_text(
        'output_dir = "~/runs/a"\n[model]\nname = "~/models/m"\n'
        '[trainer.loss]\nkl_coef = 0.1\nreference_model = "~/models/r"\n'
    )
    config = load_config(RLConfig, ["@", "conf/run.toml"])
    assert str(config.trainer.output_dir) == str(config.output_dir) == "/home/me/runs/a"
    assert config.trainer.model.name == config.orchestrator.model.name == "/home/me/models/m"
    assert config.trainer.loss.reference_model == "/home/me/models/r"
    sft = load_config(SFTConfig, ["--output-dir=~nobody-here/x", "--data.path=~/chats.jsonl"])
    assert [str(sft.output_dir), str(sft.data.path)] == ["~nobody-here/x", "/home/me/chats.jsonl"]


@pytest.mark.parametrize("text", ["$SCRATCH/run", "/data/${USER}/run"])
def test_variable_in_a_path_is_refused(folder, text):
    (folder / "run.toml").write_text(f'max_steps = 1\noutput_dir = "{text}"\n')
    with pytest.raises(ConfigError) as raised:
        load_config(RLConfig, ["@", "conf/run.toml"])
    assert (raised.value.code, raised.value.at) == ("BK-CONFIG-VALUE", "conf/run.toml:2 (output_dir)")


def test_file_next_to_the_configuration_wins(folder):
    for path, expected in (("both.jsonl", "conf/both.jsonl"), ("data", "conf/data"), ("here.jsonl",) * 2):
        ((_, found),) = environments(folder, [{"id": "mcp", "args": {"dataset": path}}])
        assert found == {"dataset": expected}


def test_absolute_paths_and_names_stay(folder):
    for path in (str(folder / "prompts.jsonl"), "org/name", "nowhere.jsonl"):
        ((_, found),) = environments(folder, [{"id": "dataset", "args": {"path": path}}])
        assert found == {"path": path}


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("my_env.py", "conf/my_env.py"),
        ("./my_env.py", "conf/my_env.py"),
        ("./project", "./conf/project"),
        ("project", "project"),
        ("other.py", "other.py"),
    ],
)
def test_environment_in_a_file_is_searched_next_to_the_configuration(folder, env_id, expected):
    assert environments(folder, [{"id": env_id}]) == [(expected, {})]
    parts = ("--trainer", "--inference", "--orchestrator")
    assert environments(folder, [{"id": env_id}], *parts, section="") == [(expected, {})]


def test_arguments_of_other_environments_stay(folder):
    args = {"path": "prompts.jsonl", "dataset": "prompts.jsonl"}
    assert environments(folder, [{"id": "my_env.py", "args": args}]) == [("conf/my_env.py", args)]


def test_flags_are_relative_to_the_working_directory(folder):
    (folder / "run.toml").write_text("")
    config = load_config(RLConfig, ["@", "conf/run.toml", "--orchestrator.env.0.id", "my_env.py"])
    assert config.orchestrator.env[0].id == "my_env.py"


def test_chats_of_fine_tuning_are_searched_next_to_the_file(folder):
    (folder / "sft.toml").write_text('[data]\npath = "prompts.jsonl"\nval_path = "here.jsonl"\n')
    data = load_config(SFTConfig, ["@", "conf/sft.toml"]).data
    assert (str(data.path), str(data.val_path)) == ("conf/prompts.jsonl", "here.jsonl")


def test_tasks_of_an_agent_are_searched_next_to_the_file(folder):
    args = {"tasks": "prompts.jsonl", "eval_tasks": "here.jsonl", "path": "prompts.jsonl"}
    ((_, found),) = environments(folder, [{"id": "agent", "args": args}])
    assert found == {"tasks": "conf/prompts.jsonl", "eval_tasks": "here.jsonl", "path": "prompts.jsonl"}


@pytest.mark.parametrize("section", ["trainer", ""])
def test_chats_of_a_trainer_are_searched_next_to_the_configuration(folder, section):
    value = {"supervised": {"path": "prompts.jsonl"}}
    (folder / "run.json").write_text(json.dumps({section: value} if section else value))
    words = ["@", "conf/run.json"] if section else ["--trainer", "@", "conf/run.json", "--orchestrator"]
    assert str(load_config(RLConfig, words).trainer.supervised.path) == "conf/prompts.jsonl"
