"""Contents of a remote run: files, arguments and keys; and files that cannot be transferred."""

import json
from pathlib import Path

import pytest

from buckeye.config.cluster import ClusterConfig
from buckeye.dataset.requirements import needed_extras
from buckeye.errors import UsageError
from buckeye.remote.project import read_project
from buckeye.remote.remote_run import check_single_node

CONFIG = """
output_dir = "{output}"
max_steps = 2
[model]
name = "{model}"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[[orchestrator.env]]
id = "{env}"
args = {{ path = "{path}" }}
[trainer]
[inference]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("HF_TOKEN", "WANDB_API_KEY", "PRIME_API_KEY", "OPENAI_API_KEY", "BUCKEYE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("BUCKEYE_HOME", raising=False)
    (folder / "env.py").write_text("")
    (folder / ".gitignore").write_text("tasks.json\n")
    (folder / "tasks.json").write_text("[]")

    def write(*, output="outputs/a", model="org/name", env="env.py", path="tasks.json"):
        text = CONFIG.format(output=output, model=model, env=env, path=path)
        (folder / "run.toml").write_text(text)
        return Path("run.toml")

    return write


def test_files_that_are_named_travel_and_the_words_stay(project):
    found = read_project(project(), resume=False)
    assert found.arguments == ("@", "run.toml")
    assert set(found.manifest.files) == {".gitignore", "env.py", "run.toml", "tasks.json"}
    assert found.remote_output_dir == "outputs/a"


def test_a_dataset_and_the_files_of_its_rewards_are_sent(project, tmp_path):
    text = (
        CONFIG.replace("[trainer]", "")
        .replace("[inference]", "")
        .format(output="outputs/a", model="org/name", env="dataset", path="data/rows.jsonl")
    )
    rewards = ["grading/reward.py:f", "json:schema.json", "judge:judge.toml", "math", "regex:" + "x" * 300]
    text = text.replace(" }", f", reward = {json.dumps(rewards)} }}")
    files = {
        "run.toml": text,
        ".gitignore": "*",
        "data/rows.jsonl": '{"prompt": "a"}',
        "grading/reward.py": "from judge import f\nimport os, numpy",
        "grading/judge.py": "import words.plain\ndef f(completion): pass",
        "grading/words/__init__.py": "",
        "grading/words/plain.py": "",
        "grading/unused.py": "",
        "schema.json": "{}",
        "judge.toml": "",
    }
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    found = read_project(Path("run.toml"), resume=False)
    assert set(found.manifest.files) == set(files) - {".gitignore", "grading/unused.py"}
    assert found.extras == ("math", "mcp", "model")
    (tmp_path / "elsewhere.py").write_text("")
    Path("run.toml").write_text(text.replace("grading/reward.py", str(tmp_path / "elsewhere.py")))
    with pytest.raises(UsageError) as caught:
        read_project(Path("run.toml"), resume=False)
    assert caught.value.code == "BK-REMOTE-TRANSFER"


@pytest.mark.parametrize(
    ("args", "extras"),
    [
        ({"path": "a.jsonl", "reward": "reward.py"}, set()),
        ({"path": "a.jsonl", "reward": ["exact", "reward.py"]}, {"mcp"}),
        ({"path": "a.parquet", "reward": "math"}, {"hub", "mcp", "math"}),
        ({"path": "org/name", "reward": "m:f"}, {"hub"}),
        ({"path": "a.jsonl", "eval_path": "parts", "reward": "m:f"}, {"hub"}),
    ],
)
def test_extras_of_a_dataset_follow_from_its_files_and_rewards(tmp_path, monkeypatch, args, extras):
    monkeypatch.chdir(tmp_path)
    Path("parts").mkdir()
    for name in ("a.jsonl", "a.parquet", "parts/b.parquet"):
        Path(name).touch()
    assert needed_extras(args) == extras


def test_a_folder_elsewhere_gets_another_name_there(project, tmp_path):
    found = read_project(project(output=tmp_path / "far" / "b"), resume=False)
    assert found.arguments[2:] == ("--output-dir", "outputs/b")
    assert found.output_dir == tmp_path / "far" / "b"


def test_a_model_that_is_a_folder_elsewhere_travels(project, tmp_path):
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    found = read_project(project(model=model), resume=False)
    assert found.manifest.files[".buckeye-model/tiny/config.json"] == model / "config.json"
    assert found.arguments[2:] == ("--model.name", ".buckeye-model/tiny")


@pytest.mark.parametrize("base_is_here", [True, False])
def test_an_adapter_to_start_from_travels_with_its_base(project, tmp_path, base_is_here):
    base, adapter = tmp_path / "far" / "base", tmp_path / "far" / "adapter"
    for folder, name in ((base, "config.json"), (adapter, "adapter_config.json")):
        folder.mkdir(parents=True)
        named = str(base) if base_is_here else "org/base"
        (folder / name).write_text(json.dumps({"base_model_name_or_path": named}))
    found = read_project(project(model=adapter), resume=False)
    name_there = ".buckeye-model/base" if base_is_here else "org/base"
    there = ("--trainer.model.adapter", ".buckeye-model/adapter/adapter", "--model.name", name_there)
    assert found.arguments[2:] == there
    assert ".buckeye-model/adapter/adapter/adapter_config.json" in found.manifest.files
    assert (".buckeye-model/base/config.json" in found.manifest.files) is base_is_here


def test_keys_that_are_known_or_given_to_servers_go_along_and_no_others(project, monkeypatch):
    values = {"HF_TOKEN": "1", "JUDGE_KEY": "2", "OTHER": "3", "PRIME_API_KEY": "4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    server = {"command": "judge", "env": {"KEY": "${JUDGE_KEY}", "PLACE": "$HOME", "RENT": "$PRIME_API_KEY"}}
    task = {
        "id": "a",
        "prompt": "Say $OTHER.",
        "mcp_config": {"judge": server},
        "evaluate_tool": {"name": "end"},
    }
    Path("tasks.json").write_text(json.dumps([task]))
    config = project(env="mcp")
    config.write_text(config.read_text().replace("path =", "dataset ="))
    assert dict(read_project(config, resume=False).secrets) == {"HF_TOKEN": "1", "JUDGE_KEY": "2"}
    assert dict(read_project(project(), resume=False).secrets) == {"HF_TOKEN": "1"}
    config = project()
    config.write_text(config.read_text().replace("args =", 'variables = ["OTHER"]\nargs ='))
    assert dict(read_project(config, resume=False).secrets) == {"HF_TOKEN": "1", "OTHER": "3"}


def test_what_rollouts_begin_with_travels_whole_and_so_do_functions_that_grade(project, tmp_path, refusal):
    """Start folders and graders are sent even if a rule would exclude them: git history, or `.gitignore`."""
    for name in ("start/.git/HEAD", "start/.env.example", "start/notes.txt", "own/data.db"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("content")
    Path(".gitignore").write_text("own/\ngraders/\n")
    Path("graders").mkdir()
    Path("graders/check.py").write_text("def grade(**given):\n    return 1.0\n")
    task = {"id": "a", "prompt": "Act.", "mcp_config": {"s": {"command": "server"}}, "files": "own"}
    Path("tasks.json").write_text(json.dumps([task]))
    Path("gym.yaml").write_text(
        "system_prompt: Act.\naction_mappings: {act: {_tool: act}}\nfiles: start\n"
        "grade: {python: 'graders/check.py:grade'}\n"
    )
    config = project(env="mcp")
    text = config.read_text().replace(
        'path = "tasks.json"', 'dataset = "tasks.json", config_path = "gym.yaml"'
    )
    config.write_text(text)
    wanted = {"start/.git/HEAD", "start/.env.example", "start/notes.txt", "own/data.db", "graders/check.py"}
    assert wanted <= set(read_project(config, resume=False).manifest.files)
    Path("gym.yaml").write_text(Path("gym.yaml").read_text().replace("start", str(tmp_path)))
    with refusal(UsageError):
        read_project(config, resume=False)


def test_what_is_outside_of_the_project_is_refused(project, tmp_path, refusal):
    (tmp_path / "far.json").write_text("[]")
    for path in (tmp_path / "far.json", "../far.json", Path("tasks.json").resolve()):
        with refusal(UsageError):
            read_project(project(path=path), resume=False)


def test_an_environment_of_the_hub_is_installed_there(project):
    (needed,) = read_project(project(env="someone/other@1.2"), resume=False).environments
    assert (needed.what, needed.wheel) == ("someone/other@1.2", None)
    assert read_project(project(), resume=False).environments == ()


def test_there_is_nothing_to_resume(project, refusal):
    with refusal(UsageError):
        read_project(project(), resume=True)


@pytest.mark.parametrize(("nodes", "hosts"), [(1, 2), (2, 1), (2, 2)])
def test_a_run_on_several_nodes_does_not_travel(nodes, hosts, refusal):
    check_single_node(ClusterConfig(), hosts=1)
    with refusal(UsageError):
        check_single_node(ClusterConfig(nodes=nodes), hosts=hosts)
