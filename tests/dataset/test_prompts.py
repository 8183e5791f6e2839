"""Tasks of rows: columns, chats, and the split that is held out."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.dataset.lazy_rows import Row
from buckeye.dataset.prompt_tasks import Columns, PromptTasks
from buckeye.dataset.prompts import find_columns, make_prompts, read_prompts, rows_of_values
from buckeye.errors import UsageError

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def columns(*rows, **named):
    found = find_columns("rows", rows_of_values(rows, "row"), **named)
    return found.kind, found.prompt, found.answer, set(found.others)


@pytest.mark.parametrize(
    ("row", "named", "expected"),
    [
        ({"prompt": "a", "answer": "1"}, {}, ("prompts", "prompt", "answer", {"answer"})),
        (
            {"question": "a", "solution": "1", "id": 3},
            {},
            ("prompts", "question", "solution", {"solution", "id"}),
        ),
        ({"prompt": "a", "question": "b"}, {}, ("prompts", "prompt", None, {"question"})),
        ({"text": "a", "y": 1}, {"prompt_column": "text"}, ("prompts", "text", None, {"y"})),
        ({"prompt": "a", "y": 1}, {"answer_column": "y"}, ("prompts", "prompt", "y", {"y"})),
        ({"prompt": "a", "answer": 1, "grade": 5}, {}, ("prompts", "prompt", "answer", {"answer", "grade"})),
        ({"messages": CHAT}, {}, ("chats", "messages", "answer", {"answer"})),
        ({"messages": CHAT[:1], "label": "4"}, {}, ("prompts", "messages", "label", {"label"})),
        ({"prompt": "a", "mcp_config": {}}, {}, ("tasks", "prompt", None, set())),
        ({"prompt": "a", "grade": {"reply": {}}}, {}, ("tasks", "prompt", None, set())),
    ],
)
def test_columns_are_found_by_name(row, named, expected):
    assert columns(row, **named) == expected


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "the first row", "y": "z" * 300}, {}),
        ({"instruction": "a", "input": "b"}, {}),
        ({"prompt": "a"}, {"prompt_column": "promt"}),
        ({"prompt": "a"}, {"answer_column": "gold"}),
    ],
)
def test_missing_and_ambiguous_columns_are_refused(refusal, row, named):
    with refusal(UsageError) as caught:
        columns(row, **named)
    assert caught.value.code == "BK-DATA-FORMAT"


def test_the_error_about_columns_can_be_printed():
    with pytest.raises(UsageError) as caught:
        columns({"text": "half \ud83d"})
    assert str(caught.value).encode()


def test_a_task_has_the_prompt_and_the_other_columns(write):
    rows = [{"prompt": "a", "answer": "1", "level": 2}]
    prompts = read_prompts(write("a.jsonl", rows))
    (task,) = prompts.splits["train"]
    assert task.messages == ({"role": "user", "content": "a"},)
    assert task.data == {"row": {"answer": "1", "level": 2}, "is_text": True, "at": "a.jsonl:1"}
    assert "eval" not in prompts.splits


def test_a_chat_is_a_prompt_with_its_last_reply_as_answer(write):
    (task,) = read_prompts(write("a.jsonl", [{"messages": CHAT}])).splits["train"]
    assert task.messages == tuple(CHAT[:1])
    assert task.data["row"] == {"answer": "4"}
    assert not task.data["is_text"]


def test_chats_must_all_end_with_a_reply(write):
    with pytest.raises(UsageError) as caught:
        read_prompts(write("a.jsonl", [{"messages": CHAT}, {"messages": CHAT[:1]}]))
    assert (caught.value.code, caught.value.at) == ("BK-DATA-FORMAT", "a.jsonl:2")


def test_csv_may_hold_messages_as_json(write):
    cell = json.dumps(CHAT[:1]).replace('"', '""')
    (task,) = read_prompts(write("a.csv", f'prompt,answer\n"{cell}",4\n')).splits["train"]
    assert task.messages == tuple(CHAT[:1])
    assert not task.data["is_text"]


def test_tasks_of_mcp_servers_are_refused(write):
    with pytest.raises(UsageError) as caught:
        read_prompts(write("a.jsonl", [{"prompt": "a", "mcp_config": {}, "evaluate_tool": {}}]))
    assert caught.value.code == "BK-DATA-FORMAT"


# The split that is held out.


def prompts_of(tasks):
    return [task.messages[0]["content"] for task in tasks]


def test_a_split_of_the_dataset_is_held_out(write):
    write("d/train.jsonl", [{"prompt": "a"}])
    write("d/validation.jsonl", [{"prompt": "b"}])
    write("d/test.jsonl", [{"prompt": "c"}])
    splits = read_prompts("d").splits
    assert (prompts_of(splits["train"]), prompts_of(splits["eval"])) == (["a"], ["c"])
    splits = read_prompts("d", split="test").splits
    assert (prompts_of(splits["train"]), prompts_of(splits["eval"])) == (["c"], ["b"])


def test_the_only_split_is_trained_on_and_a_tenth_of_it_held_out(write):
    write("d/test.jsonl", [{"prompt": f"{n}"} for n in range(10)])
    splits = read_prompts("d").splits
    assert len(splits["train"]) + len(splits["eval"]) == 10
    assert not set(prompts_of(splits["train"])) & set(prompts_of(splits["eval"]))


def test_another_dataset_is_evaluated_on_its_held_out_split(write):
    write("d/train.jsonl", [{"prompt": "a"}])
    write("d/test.jsonl", [{"prompt": "b"}])
    write("own.jsonl", [{"prompt": "c"}, {"prompt": "d"}])
    splits = read_prompts("own.jsonl", eval_source="d").splits
    assert (prompts_of(splits["train"]), prompts_of(splits["eval"])) == (["c", "d"], ["b"])
    assert prompts_of(read_prompts("d", eval_source="own.jsonl").splits["eval"]) == ["c", "d"]


@pytest.mark.parametrize("split", ["trian", "eval"])
def test_an_unknown_split_is_refused(write, refusal, split):
    write("d/train.jsonl", [{"prompt": "a"}])
    with refusal(UsageError) as caught:
        read_prompts("d", split=split)
    assert caught.value.code == "BK-DATA-FORMAT"


def test_several_splits_without_train_need_a_choice(write, refusal):
    write("a.json", json.dumps({"easy": [{"prompt": "a"}], "hard": [{"prompt": "b"}]}))
    with refusal(UsageError):
        read_prompts("a.json")
    assert prompts_of(read_prompts("a.json", split="hard").splits["train"]) == ["b"]


def hold_out(texts):
    rows = [Row({"prompt": text}, "") for text in texts]
    return PromptTasks(
        rows, Columns(kind="prompts", prompt="prompt", answer=None, others=()), "rows"
    ).hold_out()


@given(st.lists(st.text(alphabet=string.ascii_letters, min_size=1, max_size=3), max_size=60))
def test_hold_out_keeps_equal_prompts_together(texts):
    train, held_out = hold_out(texts)
    assert sorted(int(task.id) for task in [*train, *held_out]) == list(range(1, len(texts) + 1))
    assert [int(task.id) for task in train] == sorted(int(task.id) for task in train)
    assert not set(prompts_of(train)) & set(prompts_of(held_out))
    assert bool(train) == bool(texts)
    assert bool(held_out) == (len(set(texts)) > 1)


@given(st.lists(st.integers(0, 10**6), min_size=300, max_size=300, unique=True), st.randoms())
def test_hold_out_takes_a_tenth_and_does_not_depend_on_the_order(numbers, random):
    texts = [f"prompt {number}" for number in numbers]
    _, held_out = hold_out(texts)
    assert 5 <= len(held_out) <= 70
    random.shuffle(texts)
    assert set(prompts_of(hold_out(texts)[1])) == set(prompts_of(held_out))


def test_hold_out_chooses_equally_in_each_version():
    _, held_out = hold_out([f"prompt {number}" for number in range(40)])
    assert [int(text.split()[1]) for text in prompts_of(held_out)] == [3, 4, 6, 17, 34, 35, 37, 38]


@given(st.lists(st.text(min_size=1, max_size=9).filter(str.strip), min_size=2, max_size=30), st.data())
def test_a_task_is_the_same_by_index_by_slice_and_in_a_loop(texts, data):
    for tasks in hold_out(texts):
        listed = list(tasks)
        assert [tasks[index] for index in range(len(tasks))] == listed
        assert [tasks[index - len(tasks)] for index in range(len(tasks))] == listed
        bounds = data.draw(st.slices(len(tasks)))
        assert list(tasks[bounds]) == listed[bounds]


def test_the_longest_prompts_are_found_and_the_shortest():
    train, held_out = hold_out(["a" * size for size in (5, 90, 2, 70, 40, 8, 30, 11)])
    sizes = {len(text) for text in prompts_of([*train, *held_out])}
    found = [len(text) for text in prompts_of(train.extremes(2))]
    assert found[0] == min(len(text) for text in prompts_of(train))
    assert set(found[1:]) == set(sorted(len(text) for text in prompts_of(train))[-2:]) <= sizes


def test_nan_in_rows_in_memory_is_a_missing_value():
    (row,) = rows_of_values([{"prompt": "a", "answer": float("nan")}], "row")
    assert row.values == {"prompt": "a", "answer": None}


def test_names_of_columns_in_memory_become_texts():
    prompts = make_prompts("rows", rows_of_values([{"prompt": "a", 0: 1, "answer": "b"}], "row"), None)
    assert prompts.columns.others == ("0", "answer")
    assert next(prompts.tasks()).data["row"] == {"0": 1, "answer": "b"}


def test_rows_in_memory_are_tasks_too():
    rows = rows_of_values([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}], "row")
    prompts = make_prompts("rows", rows, None)
    assert {split: len(tasks) for split, tasks in prompts.splits.items()} == {"train": 1, "eval": 1}
    for values in ([], [3]):
        with pytest.raises(UsageError) as caught:
            rows_of_values(values, "row")
        assert caught.value.code == "BK-DATA-FORMAT"
