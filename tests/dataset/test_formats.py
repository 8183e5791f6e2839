"""Files with rows: formats, splits, and what is wrong with a file, by row and line."""

import json

import pytest

from buckeye.dataset.environment import make_environment
from buckeye.dataset.prompts import read_prompts
from buckeye.dataset.rows import read_splits
from buckeye.errors import UsageError

TWO = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


def values(splits):
    return {split: [dict(row.values) for row in rows] for split, rows in splits.items()}


@pytest.mark.parametrize(
    ("name", "text", "places"),
    [
        ("a.jsonl", '{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": "2"}\n', [":1", ":3"]),
        ("a.ndjson", '{"prompt": "a", "answer": "1"}\r\n{"prompt": "b", "answer": "2"}', [":1", ":2"]),
        ("a.json", json.dumps(TWO, indent=1), [":2", ":6"]),
        ("b.json", '\ufeff{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n', [":1", ":2"]),
        ("c.json", '{"prompt": ["a", "b"], "answer": ["1", "2"]}', [": row 1", ": row 2"]),
        ("d.json", json.dumps({"data": TWO}), [": data, row 1", ": data, row 2"]),
        ("a.csv", "prompt,answer\na,1\n\nb,2\n", [":2", ":4"]),
        ("b.csv", '\n"prompt"; answer\r\n"a";1\r\n"b";2', [":3", ":4"]),
        ("A.CSV", "prompt,answer\na,1\nb,2\n", [":2", ":3"]),
        ("A.TSV", "prompt\tanswer\na\t1\nb\t2\n", [":2", ":3"]),
        ("A.JSON", json.dumps(TWO, indent=1), [":2", ":6"]),
        ("a.tsv", "prompt\tanswer\na\t1\nb\t2\n", [":2", ":3"]),
    ],
)
def test_each_text_format_has_the_rows_and_their_lines(write, name, text, places):
    splits = read_splits(write(name, text))
    assert values(splits) == {"train": TWO}
    assert [row.at for row in splits["train"]] == [f"{name}{place}" for place in places]


def test_folder_with_a_compressed_file_is_refused(write):
    write("d/train.jsonl.gz", "\x1f\x8b")
    write("d/test.jsonl", TWO)
    with pytest.raises(UsageError) as caught:
        read_splits("d")
    assert caught.value.code == "BK-FILE-FORMAT"
    assert "train.jsonl.gz" in caught.value.message


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path):
    import pyarrow
    from pyarrow import parquet

    columns = [pyarrow.array(["a"]), pyarrow.array(["1"]), pyarrow.array(["2"])]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UsageError) as caught:
        read_splits(str(tmp_path / "a.parquet"))
    assert caught.value.code == "BK-DATA-FORMAT"


@pytest.mark.parametrize("name", ["a.jsonl", "list.json", "columns.json", "a.parquet"])
def test_nan_is_a_missing_value(tmp_path, name):
    rows = [{"prompt": "a", "answer": 1.0}, {"prompt": "b", "answer": float("nan")}]
    if name == "a.parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    else:
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        lines = "\n".join(map(json.dumps, rows))
        texts = {"a.jsonl": lines, "list.json": json.dumps(rows), "columns.json": json.dumps(columns)}
        (tmp_path / name).write_text(texts[name])
    assert [row.values["answer"] for row in read_splits(str(tmp_path / name))["train"]] == [1.0, None]


def test_a_json_object_without_lists_is_one_row(write):
    assert values(read_splits(write("a.json", '{"prompt": "a"}'))) == {"train": [{"prompt": "a"}]}


def test_parquet_values_become_json_values_and_binary_columns_are_left_out(tmp_path, caplog):
    import datetime
    import decimal

    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "prompt": [{"role": "user", "content": "a"}],
            "day": datetime.date(2026, 1, 2),
            "price": decimal.Decimal("1.5"),
            "span": datetime.timedelta(seconds=2),
            "image": {"bytes": b"x", "path": "p"},
            "none": None,
        }
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (row,) = read_splits(str(tmp_path / "a.parquet"))["train"]
    assert row.at == f"{tmp_path}/a.parquet: row 1"
    assert json.loads(json.dumps(row.values)) == {
        "prompt": [{"role": "user", "content": "a"}],
        "day": "2026-01-02",
        "price": 1.5,
        "span": "0:00:02",
        "none": None,
    }
    assert "image" in caplog.text


def test_empty_cell_of_a_csv_has_no_value(write):
    assert read_splits(write("a.csv", "prompt,answer\na,\nb, \n"))["train"][0].values["answer"] is None


@pytest.mark.parametrize(("rows", "at"), [("a,1\n,2", "prompt has no value"), ("a,1\nb,", "no `answer`")])
def test_empty_cell_of_a_csv_is_reported_with_its_column(write, rows, at):
    path = write("a.csv", f"prompt,answer\n{rows}\n")
    with pytest.raises(UsageError) as refused:
        make_environment(read_prompts(path), [lambda completion, answer: 1.0])
    assert (refused.value.code, refused.value.at) == ("BK-DATA-FORMAT", "a.csv:3")
    assert at in refused.value.message


def test_csv_values_may_have_quotes_delimiters_and_line_breaks(write):
    text = 'prompt,answer\n"Say ""hi"",\nthen go",1\n"b",2\n'
    rows = read_splits(write("a.csv", text))["train"]
    assert [row.values["prompt"] for row in rows] == ['Say "hi",\nthen go', "b"]
    assert [row.at for row in rows] == ["a.csv:2", "a.csv:4"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("train.jsonl", "test.jsonl"), {"train": 1, "test": 1}),
        (("data/train-00000.csv", "data/train-00001.csv", "data/validation-00000.csv"), None),
        (("training_set.jsonl", "dev.jsonl"), {"train": 1, "validation": 1}),
        (("contest.jsonl", "latest.jsonl"), {"train": 2}),
        (("prompts.jsonl", "test.jsonl"), {"train": 1, "test": 1}),
        ((".cache/train.jsonl", "rows.jsonl", "dataset_infos.json"), {"train": 1}),
    ],
)
def test_file_names_state_the_splits_of_a_folder(write, files, expected):
    for name in files:
        write(f"d/{name}", "prompt\na\n" if name.endswith("csv") else [{"prompt": "a"}])
    counts = {split: len(rows) for split, rows in read_splits("d").items()}
    assert counts == (expected or {"train": 2, "validation": 1})


def test_a_file_without_a_split_in_its_name_is_not_read_next_to_train(write, caplog):
    write("d/train.jsonl", [{"prompt": "a"}])
    write("d/notes.json", "[1]")
    assert values(read_splits("d")) == {"train": [{"prompt": "a"}]}
    assert "notes.json" in caplog.text


def test_keys_of_a_json_object_state_splits(write):
    write("a.json", json.dumps({"train": TWO, "eval": TWO[:1], "hard": TWO[1:]}))
    splits = read_splits("a.json")
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 2, "test": 1, "hard": 1}
    assert splits["test"][0].at == "a.json: eval, row 1"


def test_one_of_several_subsets_must_be_chosen(write, refusal):
    write("d/easy/train.jsonl", TWO)
    write("d/hard/train.jsonl", TWO)
    with refusal(UsageError) as caught:
        read_splits("d")
    assert caught.value.code == "BK-DATA-FORMAT"
    assert values(read_splits("d/hard")) == {"train": TWO}


PARTS = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
MALFORMED = {
    "half of a surrogate pair": ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b \\ud83d"}\n', "a.jsonl:2"),
    "ragged CSV": ("a.csv", "prompt,answer\na,1\nWhat, if,2\n", "a.csv:3"),
    "CSV with an open quote": ("a.csv", 'prompt,answer\na,1\n"b,2\nc,3\n', "a.csv:3"),
    "CSV with a stray quote": ("a.csv", 'prompt,answer\na,1\n"b" c,2\n', "a.csv:3"),
    "duplicate header": ("a.csv", "prompt,answer,prompt\na,1,b\n", "a.csv:1"),
    "JSON cut in the middle": ("a.json", '[{"prompt": "a"},\n {"prompt": "b"', "a.json:2:16"),
    "JSON without a comma": ("a.json", '[{"prompt": "a"}\n {"prompt": "b"}]', "a.json:2:2"),
    "text after JSON": ("a.json", '[{"prompt": "a"}]\nmore', "a.json:2:1"),
    "a line that is not JSON": ("a.jsonl", "{\"prompt\": \"a\"}\n{'prompt': 'b'}\n", "a.jsonl:2"),
    "a number of 5000 digits": ("a.jsonl", '{"prompt": "a", "answer": ' + "9" * 5000 + "}\n", "a.jsonl:1"),
    "nested too deeply": ("a.jsonl", '{"prompt": ' + "[" * 200_000 + "\n", "a.jsonl:1"),
    "Latin-1": ("a.jsonl", '{"prompt": "a"}\n{"prompt": "caf\xe9"}\n'.encode("latin-1"), "a.jsonl:2"),
    "UTF-16": ("a.csv", "prompt\na\n".encode("utf-16"), "a.csv:1"),
    "list of texts": ("a.json", '["a", "b"]', "a.json: row 1"),
    "default of pandas": ("a.json", '{"prompt": {"0": "a"}, "answer": {"0": "1"}}', "a.json"),
    "columns of other lengths": ("a.json", '{"prompt": ["a", "b"], "answer": ["1"]}', "a.json"),
    "null prompt": ("a.jsonl", [{"prompt": "a"}, {"prompt": None}], "a.jsonl:2"),
    "blank prompt": ("a.jsonl", [{"prompt": "a"}, {"prompt": " \n"}], "a.jsonl:2"),
    "no prompt": ("a.jsonl", [{"prompt": "a"}, {"answer": "1"}], "a.jsonl:2"),
    "a number as prompt": ("a.jsonl", [{"prompt": 3}], "a.jsonl:1"),
    "misspelled role": ("a.jsonl", [{"prompt": [{"role": "usr", "content": "a"}]}], "a.jsonl:1"),
    "no role": ("a.jsonl", [{"prompt": [{"from": "human", "value": "a"}]}], "a.jsonl:1"),
    "no content": ("a.jsonl", [{"prompt": [{"role": "user"}]}], "a.jsonl:1"),
    "text in place of a message": ("a.jsonl", [{"prompt": ["a"]}], "a.jsonl:1"),
    "image": ("a.jsonl", [{"prompt": PARTS}], "a.jsonl:1"),
    "prompt ends with a reply": (
        "a.jsonl",
        [{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
        "a.jsonl:1",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_dataset_is_refused_with_its_place(write, refusal, case):
    name, content, at = MALFORMED[case]
    with refusal(UsageError) as caught:
        read_prompts(write(name, content))
    code = "BK-FILE-UNREADABLE" if case in ("Latin-1", "UTF-16") else "BK-DATA-FORMAT"
    assert (caught.value.code, caught.value.at) == (code, at)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("empty.jsonl", "\n \n", "BK-DATA-FORMAT"),
        ("header.csv", "prompt,answer\n", "BK-DATA-FORMAT"),
        ("list.json", "[]", "BK-DATA-FORMAT"),
        ("number.json", "3", "BK-DATA-FORMAT"),
        ("rows.xlsx", "PK", "BK-FILE-FORMAT"),
        ("rows.parquet", "PAR", "BK-FILE-FORMAT"),
        ("folder/readme.md", "#", "BK-DATA-FORMAT"),
        ("rows.jsonl.gz", "\x1f\x8b", "BK-FILE-FORMAT"),
    ],
)
def test_a_file_without_rows_is_refused(write, refusal, name, content, code):
    write(name, content)
    with refusal(UsageError) as caught:
        read_prompts(name.partition("/")[0])
    assert caught.value.code == code


@pytest.mark.parametrize("name", ["promts.jsonl", "data/prompts.csv", "some/where/rows.tsv"])
def test_a_missing_file_is_not_searched_on_the_hub(write, name):
    write("prompts.jsonl", TWO)
    with pytest.raises(UsageError) as caught:
        read_prompts(name)
    assert caught.value.code == "BK-DATA-NOT-FOUND"
    assert ("prompts.jsonl" in caught.value.hint) == (name == "promts.jsonl")


def test_equal_suffixes_do_not_make_names_similar(write):
    write("a.jsonl", TWO)
    with pytest.raises(UsageError) as caught:
        read_prompts("questions.jsonl")
    assert "a.jsonl" not in caught.value.hint


def test_all_malformed_rows_are_listed_up_to_ten(write, wording):
    with pytest.raises(UsageError) as caught:
        read_prompts(write("a.jsonl", [{"prompt": None}] * 12))
    assert str(caught.value) == wording
