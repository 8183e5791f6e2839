"""Datasets of the Hugging Face hub: the files that are downloaded, and their size."""

import json

import pytest

from buckeye.dataset.prompts import read_prompts
from buckeye.dataset.rows import read_splits
from buckeye.errors import UsageError
from buckeye.mcp.tasks import dataset
from tests.mcp.tasks.conftest import hub

__all__ = ["hub"]


def lines(*prompts):
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts).encode()


@pytest.fixture(autouse=True)
def own_cache(hub, tmp_path, monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)


def test_files_of_rows_are_downloaded_and_no_others(hub, tmp_path):
    hub.files["org/rows"] = {
        "train.jsonl": lines("a", "b"),
        "test.csv": b"prompt\nc\n",
        "README.md": b"#",
        "model.bin": b"x",
    }
    splits = read_prompts("org/rows").splits
    assert {split: len(tasks) for split, tasks in splits.items()} == {"train": 2, "eval": 1}
    names = {path.name for path in (tmp_path / "hub").rglob("*") if path.is_symlink()}
    assert names == {"train.jsonl", "test.csv"}


def test_a_subset_is_downloaded_alone(hub, tmp_path):
    hub.files["org/parts"] = {"easy/train.jsonl": lines("a"), "hard/train.jsonl": lines("b")}
    assert [row.values for row in read_splits("org/parts/hard")["train"]] == [{"prompt": "b"}]
    assert {path.name for path in (tmp_path / "hub").rglob("*.jsonl")} == {"train.jsonl"}


@pytest.mark.parametrize("name", ["org/none", "org/empty", "org/rows/missing"])
def test_a_dataset_without_rows_is_refused(hub, name):
    hub.files |= {"org/empty": {"README.md": b"#"}, "org/rows": {"train.jsonl": lines("a")}}
    with pytest.raises(UsageError) as caught:
        read_splits(name)
    assert caught.value.code in ("BK-DATA-NOT-FOUND", "BK-DATA-FORMAT")


def test_a_dataset_that_is_too_large_is_not_downloaded(hub, tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(dataset, "_MAX_DOWNLOAD_BYTES", 20)
    hub.files["org/large"] = {"train.json": b"x" * 11, "test.json": b"x" * 11, "info.md": b"x" * 1000}
    with refusal(UsageError) as caught:
        read_splits("org/large")
    assert caught.value.code == "BK-DATA-FORMAT"
    assert not list((tmp_path / "hub").rglob("*.json"))
