"""Rows that are decoded when they are read: the same rows as those of the whole text."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.dataset import lazy_rows
from buckeye.dataset.environment import load_environment
from buckeye.dataset.lazy_rows import JoinedRows, Row, column_names, json_lines_rows, json_list_rows
from buckeye.dataset.rows import read_splits
from buckeye.errors import UsageError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=4), min_size=1, max_size=12)


@given(ROWS, st.booleans(), st.sampled_from(["\n", "\r\n", "\n \n", "\n\n\n"]))
def test_json_lines_have_the_rows_and_lines_of_the_text(tmp_path_factory, rows, ascii_only, separator):
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    text = separator.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    path.write_bytes(text.encode())
    found = json_lines_rows(path)
    assert [row.values for row in found] == rows
    assert [found[index] for index in range(len(found))] == list(found)
    lines = text.split("\n")
    assert [json.loads(lines[int(row.at.rpartition(":")[2]) - 1]) for row in found] == rows
    assert list(found.names) == list(dict.fromkeys(name for row in rows for name in row))


@given(ROWS, st.sampled_from([None, 0, 2]), st.sampled_from([(",", ":"), (" ,\n\n", " : ")]))
def test_a_json_list_has_the_rows_and_lines_of_the_text(tmp_path_factory, rows, indent, separators):
    path = tmp_path_factory.mktemp("rows") / "a.json"
    text = json.dumps(rows, indent=indent, separators=separators, ensure_ascii=False)
    path.write_bytes(text.encode())
    found = json_list_rows(path)
    assert [row.values for row in found] == rows
    assert [found[index] for index in range(len(found))] == list(found)
    lines = text.split("\n")
    for row in found:
        line = lines[int(row.at.rpartition(":")[2]) - 1]
        assert "{" in line


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt": "a"}\n{"prompt": "b"',
        b'{"prompt": "a"}\n[1]\n',
        b'{"prompt": "\xff"}\n',
        b'\xef\xbb\xbf{"prompt": "a"}\n',
        b'{"prompt": NaN}\n',
        b'{"prompt": "\\ud83d"}\n',
        b"",
        b"[]",
    ],
)
def test_other_files_are_left_to_the_reader_of_texts(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    assert json_lines_rows(path) is None
    assert json_list_rows(path) is None


def test_a_small_file_may_change_while_it_is_used(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    rows = json_lines_rows(path)
    path.write_text("")
    assert [row.values["prompt"] for row in rows] == ["a", "b"] == [rows[0].values["prompt"], "b"]


def test_a_large_file_that_changes_while_it_is_used_is_an_error(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lazy_rows, "_KEPT_BYTES", 0)
    path = Path("a.jsonl")
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    rows = json_lines_rows(path)
    replacement = Path("b")
    replacement.write_text('{"prompt": "x"}\n')
    os.replace(replacement, path)
    assert rows[1].values == {"prompt": "b"}  # the open file is the old one
    rows = json_lines_rows(path)
    path.write_text('{"prompt": "longer"}\n')
    with refusal(UsageError) as caught:
        rows[0]
    assert caught.value.code == "BK-DATA-FORMAT"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_rows_of_several_files_follow_each_other(sizes, data):
    numbers = iter(range(100))
    parts = [[Row({"number": next(numbers)}, "") for _ in range(size)] for size in sizes]
    joined = JoinedRows(parts)
    flat = [row for part in parts for row in part]
    assert list(joined) == flat
    assert len(joined) == len(flat)
    assert [joined[index] for index in range(len(flat))] == flat
    if flat:
        index = data.draw(st.integers(-len(flat), len(flat) - 1))
        assert joined[index] == flat[index]
    with pytest.raises(IndexError):
        joined[len(flat)]


def test_parquet_rows_are_equal_by_index_and_in_a_loop(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"prompt": [f"p{number}" for number in range(2500)], "level": list(range(2500))})
    parquet.write_table(table, tmp_path / "train-0.parquet", row_group_size=700)
    parquet.write_table(table, tmp_path / "train-1.parquet")
    rows = read_splits(str(tmp_path))["train"]
    assert len(rows) == 5000
    assert column_names(rows) == ("prompt", "level")
    for index in (0, 1, 1023, 1024, 2499, 2500, 4999, -1):
        assert rows[index] == list(rows)[index]


def test_many_tasks_need_little_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for number in range(20_000):
            file.write(json.dumps({"prompt": f"{number}: " + "words " * 40, "answer": str(number)}) + "\n")
    tracemalloc.start()
    environment = load_environment(str(path), "exact")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(environment.tasks("train")) + len(environment.tasks("eval")) == 20_000
    assert peak < 2 * path.stat().st_size
