"""`buckeye hf` as a user runs it: refusals, written files and uploads to the hub."""

import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from buckeye.errors import BuckeyeError, UsageError
from buckeye.mcp.environment import load_environment
from buckeye.mcp.tasks.dataset import read_splits
from buckeye.mcp.tasks.lock_file import read_lock

CONFIG = "system_prompt: play\naction_mappings:\n  done:\n    _tool: null\n"
LOCK = 'image: "my-org/my-env:latest"  # mine\n'


def task(number=1, **more):
    return {
        "id": f"task-{number}",
        "prompt": f"Do {number}.",
        "mcp_config": {"env": {"command": "serve", "env": {"API_KEY": "$MY_KEY"}}},
        "setup_tool": {"name": "setup", "arguments": {"name": "board", "size": 4}},
        "evaluate_tool": {"name": "evaluate", "arguments": {"name": "max", "arguments": {"target": 8}}},
        "metadata": {"difficulty": "easy"},
        **more,
    }


def rows(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def test_the_columns(hf):
    tasks = [task(1), {**task(2), "setup_tool": None, "metadata": {}}]
    hf("tasks.json", "--name", "local-dataset", "--no-push", tasks=tasks)
    first, second = rows("local-dataset/data/train-00000-of-00001.parquet")
    assert list(first) == ["id", "prompt", "mcp_config", "setup_tool", "evaluate_tool", "metadata"]
    assert {k: v if k in ("id", "prompt") else json.loads(v) for k, v in first.items()} == task(1)
    assert second["setup_tool"] is None
    assert second["metadata"] is None


def test_plaintext_keys_are_refused(hf, refusal):
    servers = {
        "a": {"url": "http://x/mcp", "headers": {"Authorization": "Bearer sk-planted", "Mcp-Image": "a:b"}},
        "b": {"command": "x", "env": {"API_KEY": "planted", "MODE": "fast", "TOKEN": "${TOKEN}"}},
    }
    with refusal(UsageError) as caught:
        hf("tasks.json", "--name", "d", "--no-push", tasks=task(mcp_config=servers))
    assert "planted" not in str(caught.value)


def test_mcp_config_is_inferred_from_the_lock_and_the_lock_is_kept(hf, monkeypatch, wording):
    Path("buckeye.lock.yaml").write_text(LOCK)
    without = task()
    del without["mcp_config"]
    printed = hf("tasks.json", "--name", "my-org/local", "--no-push", tasks=[without, task(2)])
    assert printed == wording
    ((one, _), _) = read_splits(Path("my-org/local"))
    server = one.mcp_config["buckeye"]
    assert server.url == "http://localhost:8765/mcp"
    assert server.headers["Mcp-Image"] == "my-org/my-env:latest"
    assert "BUCKEYE_API_KEY" in server.headers["Authorization"]
    raw = Path("buckeye.lock.yaml").read_text()
    assert raw.startswith(LOCK)
    dataset = read_lock(Path("buckeye.lock.yaml")).primary_dataset
    assert (dataset.name, dataset.task_count) == ("my-org/local", 2)
    age = datetime.now(UTC) - datetime.fromisoformat(dataset.updated_at)
    assert age.total_seconds() < 300
    assert dataset.updated_at.endswith("+00:00")


def test_lock_file_is_not_created(hf, wording):
    assert hf("tasks.json", "-n", "d", "--no-push", tasks=task()) == wording
    assert not Path("buckeye.lock.yaml").exists()


def test_the_split_is_by_id_and_stays_when_tasks_are_added(hf):
    tasks = [task(n) for n in range(200)]
    hf("tasks.json", "-n", "d", "--no-push", "--split", "0.2", tasks=tasks[:100])
    _, before = read_splits(Path("d"))
    assert 10 <= len(before) <= 32
    hf("tasks.json", "-n", "d", "--no-push", "--split", "0.2", "--yes", tasks=tasks[::-1])
    _, after = read_splits(Path("d"))
    old = {one["id"] for one in tasks[:100]}
    assert {one.id for one in after} & old == {one.id for one in before}
    assert len(after) > len(before)


def test_a_split_in_the_metadata(hf, refusal):
    tasks = [task(1, metadata={"split": "train"}), task(2, metadata={"split": "eval"})]
    hf("tasks.json", "-n", "d", "--no-push", tasks=tasks)
    assert [row["id"] for row in rows("d/data/test-00000-of-00001.parquet")] == ["task-2"]
    with refusal(UsageError):
        hf("tasks.json", "-n", "e", "--no-push", "--split", "0.5")
    with refusal(UsageError):
        hf("tasks.json", "-n", "e", "--no-push", tasks=[tasks[1]])


def test_written_dataset_loads_as_an_environment(hf):
    Path("c.yaml").write_text(CONFIG)
    tasks = [task(1), task(2), task(3, metadata={"split": "eval"})]
    hf("tasks.json", "-n", "d", "--no-push", tasks=tasks)
    environment = load_environment("d", "c.yaml")
    assert {split: [one.id for one in environment.tasks(split)] for split in environment.splits} == {
        "train": ["task-1", "task-2"],
        "eval": ["task-3"],
    }
    (file,) = Path("d/data").glob("train-*")
    assert [one.id for one in load_environment(str(file), "c.yaml", num_tasks=1).tasks("train")] == ["task-1"]
    both = load_environment("tasks.json", "c.yaml", num_tasks=2)
    assert [one.data for one in both.tasks("train")] == [one.data for one in environment.tasks("train")]


def test_invalid_datasets_are_refused(tmp_path, refusal):
    (tmp_path / "empty").mkdir()
    with refusal(UsageError):
        read_splits(tmp_path / "empty")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    for name in ("bad.parquet", "none.parquet"):
        with pytest.raises(UsageError, match=name) as caught:
            read_splits(tmp_path / name)
        assert caught.value.code.startswith("BK-DATA-")


def test_the_card_has_facts_and_valid_front_matter(hf):
    hf("tasks.json", "-n", "d", "--no-push", tasks=[task(1), task(2, metadata={"split": "eval"})])
    card = Path("d/README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["configs"][0]["data_files"] == [
        {"split": "train", "path": "data/train-*"},
        {"split": "test", "path": "data/test-*"},
    ]
    for fact in ("| tasks | 1 train, 1 test |", "| environments | `serve` |", "| variables | `MY_KEY` |"):
        assert fact in body


def test_existing_files_are_not_overwritten(hf, refusal):
    hf("tasks.json", "-n", "d", "--no-push", tasks=task())
    with refusal(UsageError):
        hf("tasks.json", "-n", "d", "--no-push")
    Path("d/notes.txt").write_text("mine")
    with refusal(UsageError):
        hf("tasks.json", "-n", "d", "--no-push", "--yes")
    assert Path("d/notes.txt").read_text() == "mine"
    with pytest.raises(UsageError, match="is a file"):
        hf("tasks.json", "-n", "d", "--no-push", "-o", "tasks.json", "--yes")


def test_a_dry_run_changes_nothing(hf, tmp_path, wording):
    Path("buckeye.lock.yaml").write_text(LOCK)
    words = ("tasks.json", "-n", "my-org/x", "--dry-run", "--split", "0.5")
    printed = hf(*words, tasks=[task(n) for n in range(9)])
    assert printed == wording
    assert sorted(path.name for path in tmp_path.iterdir()) == ["buckeye.lock.yaml", "tasks.json"]
    assert Path("buckeye.lock.yaml").read_text() == LOCK


@pytest.mark.parametrize(
    "words",
    [
        "tasks.json",
        "tasks.json -n no-org",
        "tasks.json -n ../x --no-push",
        "tasks.json -n a/b/c --no-push",
        "none.json -n a --no-push",
        "tasks.json -n a/b",
    ],
)
def test_wrong_usage(hf, monkeypatch, tmp_path, words, refusal):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with refusal(UsageError):
        hf(*words.split(), tasks=task())


def test_the_usual_file_is_found(hf):
    assert "tasks.json: 1 task (" in hf("-n", "d", "--no-push", tasks=task())
    Path("more_tasks.json").write_text(json.dumps(task()))
    with pytest.raises(UsageError) as refused:
        hf("-n", "e", "--no-push")
    assert refused.value.code == "BK-CLI-MISSING"


def test_a_push(hf, hub, refusal, wording):
    Path("buckeye.lock.yaml").write_text(LOCK)
    tasks = [task(1), task(2, metadata={"split": "eval"})]
    printed = hf("tasks.json", "--name", "my-org/my-dataset", tasks=tasks)
    assert printed == wording
    files = hub.files["my-org/my-dataset"]
    assert sorted(set(files) - {".gitattributes"}) == [
        "README.md",
        "data/test-00000-of-00001.parquet",
        "data/train-00000-of-00001.parquet",
    ]
    (row,) = pyarrow.parquet.read_table(io.BytesIO(files["data/train-00000-of-00001.parquet"])).to_pylist()
    assert json.loads(row["mcp_config"])["env"]["env"] == {"API_KEY": "$MY_KEY"}  # unresolved
    assert read_lock(Path("buckeye.lock.yaml")).primary_dataset.name == "my-org/my-dataset"
    assert hub.tokens == {"Bearer hf_planted_token_0123456789"}
    assert not list(Path().glob("**/*.parquet"))
    for path in Path().rglob("*"):
        assert path.is_dir() or b"planted" not in path.read_bytes()
    with refusal(UsageError):
        hf("tasks.json", "--name", "my-org/my-dataset", tasks=[task(1)])
    hf("tasks.json", "--name", "my-org/my-dataset", "--yes")
    assert "data/test-00000-of-00001.parquet" not in hub.files["my-org/my-dataset"]  # removed with its task


def test_a_private_push(hf, hub, refusal):
    assert "new, private" in hf("tasks.json", "--name", "my-org/p", "--private", tasks=task())
    assert hub.private["my-org/p"] is True
    hf("tasks.json", "--name", "my-org/open", tasks=task())
    with refusal(UsageError):
        hf("tasks.json", "--name", "my-org/open", "--private", "--yes")


def test_a_push_that_fails(hf, hub, refusal):
    hub.broken = True
    Path("buckeye.lock.yaml").write_text(LOCK)
    with refusal(BuckeyeError):
        hf("tasks.json", "--name", "my-org/x", tasks=task())
    assert Path("buckeye.lock.yaml").read_text() == LOCK


def test_no_token_in_argv(hf):
    assert "--token" not in hf("--help")
