"""Task files: what is printed in the documentation loads, and all that is wrong is said at once."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buckeye.errors import UsageError
from buckeye.mcp.tasks.files import read_rows, read_tasks
from buckeye.mcp.tasks.task_schema import HttpServer, StdioServer, ToolCall, call_arguments

PRINTED = """{
  "id": "task-001",
  "prompt": "Complete the task description",
  "mcp_config": {
    "buckeye": {
      "url": "http://localhost:8765/mcp",
      "headers": {
        "Authorization": "Bearer $buckeye_API_KEY",
        "Mcp-Image": "your-org/your-env:latest"
      }
    }
  },
  "setup_tool": {
    "name": "setup",
    "arguments": {
      "name": "function_name",
      "param": "value"
    }
  },
  "evaluate_tool": {
    "name": "evaluate",
    "arguments": {
      "name": "evaluator_name",
      "expected": "value"
    }
  },
  "metadata": {
    "difficulty": "easy",
    "category": "task_type"
  }
}
"""
HUB = {"properties": {"name": {"type": "string"}, "arguments": {"type": "object"}}}


def task(**changes):
    return {**json.loads(PRINTED), **changes}


def written(tmp_path, content, name="tasks.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return path


def refused(tmp_path, content, name="tasks.json"):
    with pytest.raises(UsageError) as caught:
        read_tasks(written(tmp_path, content, name))
    return str(caught.value)


def test_the_task_as_printed(tmp_path):
    (read,) = read_tasks(written(tmp_path, PRINTED))
    assert read.id == "task-001"
    assert read.mcp_config["buckeye"] == HttpServer(
        url="http://localhost:8765/mcp",
        headers={"Authorization": "Bearer $buckeye_API_KEY", "Mcp-Image": "your-org/your-env:latest"},
    )
    assert read.setup_tool == [ToolCall(name="setup", arguments={"name": "function_name", "param": "value"})]
    assert [call.name for call in read.evaluate_tool] == ["evaluate"]
    assert read.metadata == {"difficulty": "easy", "category": "task_type"}


def test_one_object_a_list_and_json_lines_are_the_same_tasks(tmp_path):
    tasks = [task(), task(id="b", setup_tool=None, metadata={})]
    whole = read_tasks(written(tmp_path, tasks))
    lines = "\n\n".join(json.dumps(one) for one in tasks)
    assert read_tasks(written(tmp_path, lines, "tasks.jsonl")) == whole
    assert read_tasks(written(tmp_path, lines)) == whole
    assert read_tasks(written(tmp_path, tasks[0])) == whole[:1]
    assert whole[1].setup_tool == []


def test_a_call_alone_is_a_list_of_one_and_ids_are_optional(tmp_path):
    call = {"name": "evaluate"}
    one, other = [task(evaluate_tool=call), task(evaluate_tool=[call, call])]
    del one["id"], other["id"]
    first, second = read_tasks(written(tmp_path, [one, other]))
    assert (first.id, second.id) == ("task-0001", "task-0002")
    assert first.evaluate_tool == [ToolCall(name="evaluate")]
    assert second.evaluate_tool == 2 * [ToolCall(name="evaluate")]


def test_a_server_may_be_a_process(tmp_path):
    servers = {
        "a": {"command": "python", "args": ["-m", "x"], "env": {"K": "$K"}},
        "b": {"url": "http://h/mcp"},
    }
    (read,) = read_tasks(written(tmp_path, task(mcp_config=servers)))
    assert read.mcp_config["a"] == StdioServer(command="python", args=["-m", "x"], env={"K": "$K"})
    assert isinstance(read.mcp_config["b"], HttpServer)


def test_every_problem_is_named_with_file_line_task_and_field(tmp_path):
    bad = [
        task(promt="x", evaluate_tool=[{"nam": "evaluate"}]),
        task(id="task-001"),
        task(
            id="c", prompt=5, mcp_config={"s": {"url": "ftp://x"}, "t": {"command": "a", "url": "http://b"}}
        ),
        "no task",
        task(
            id="e", mcp_config={"s": {"url": "http://x", "header": {}}}, setup_tool={"name": "s", "args": {}}
        ),
        task(id="f", mcp_config={"s": {}}, evaluate_tool=[5]),
    ]
    text = json.dumps(bad, indent=1)
    message = refused(tmp_path, text)
    path = tmp_path / "tasks.json"

    def line(part):
        return text[: text.index(part)].count("\n") + 1

    told = [row.strip() for row in message.splitlines()]
    assert told[0] == f"12 problems in {path}"
    assert f"{path}:{line('promt')}: task 1 (task-001): promt: no such key. Did you mean prompt?" in told
    assert any("evaluate_tool.0.name: required." in row for row in told)
    assert any("evaluate_tool.0.nam: no such key. Did you mean name?" in row for row in told)
    assert any("task 2 (task-001): id: 'task-001' is the id of task 1 too." in row for row in told)
    assert any("task 3 (c): prompt: is 5; expected a valid string." in row for row in told)
    assert f"{path}:{line('ftp://x')}: task 3 (c): mcp_config.s.url" in message
    assert any(
        "task 3 (c): mcp_config.t: is an object; expected an object with either url" in row for row in told
    )
    assert any('task 4: is "no task"; expected an object' in row for row in told)
    assert any("mcp_config.s.header: no such key. Did you mean headers?" in row for row in told)
    assert any("setup_tool.args: no such key. Did you mean arguments?" in row for row in told)
    assert any(
        "task 6 (f): mcp_config.s: is an object; expected an object with either url" in row for row in told
    )
    assert any("task 6 (f): evaluate_tool.0: is 5; expected" in row for row in told)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "not valid JSON"),
        ("[]", "has no tasks"),
        ('{"id": "a", "id": "b"}', "the key 'id' is there twice"),
        ('[{"prompt": NaN}]', "NaN is not a number"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"prompt": "a",}]', "tasks.json:1:"),
        ("5", "is 5; expected an object"),
        ('[{"prompt": "", "mcp_config": {}, "evaluate_tool": []}]', "2 problems"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, part):
    assert part in refused(tmp_path, content)


def test_every_bad_line_is_named(tmp_path):
    lines = f"{json.dumps(task())}\nnot json\n\n{json.dumps(task(id='b', prompt=None))}\n{{\n"
    message = refused(tmp_path, lines, "tasks.jsonl")
    assert "3 problems" in message
    assert "tasks.jsonl:2:1: not valid JSON" in message
    assert "tasks.jsonl:4: task 3 (b): prompt: is null" in message
    assert "tasks.jsonl:5:" in message


def test_a_missing_file_and_one_that_is_not_utf8(tmp_path):
    with pytest.raises(UsageError, match="there is no file"):
        read_tasks(tmp_path / "none.json")
    path = tmp_path / "latin.json"
    path.write_bytes(b"\n\xe9")
    with pytest.raises(UsageError, match=r"latin\.json:2: not UTF-8"):
        read_tasks(path)


def test_rows_of_a_dataset_hold_json_as_text(tmp_path):
    row = {key: value if isinstance(value, str) else json.dumps(value) for key, value in task().items()}
    assert read_rows([row], "org/set") == read_tasks(written(tmp_path, PRINTED))
    (bare,) = read_rows([{**row, "setup_tool": "{}", "metadata": "{}"}], "org/set")
    assert bare.setup_tool == []
    with pytest.raises(
        UsageError, match=r"org/set: task 1 \(task-001\): mcp_config: its text is not valid JSON"
    ):
        read_rows([{**row, "mcp_config": "{"}], "org/set")


def test_arguments_of_a_dispatching_tool():
    flat = ToolCall(name="setup", arguments={"name": "board", "size": 4})
    nested = ToolCall(name="setup", arguments={"name": "board", "arguments": {"size": 4}})
    for call in (flat, nested):
        assert call_arguments(call, HUB) == {"name": "board", "arguments": {"size": 4}}
    plain = {"properties": {"name": {}, "size": {}}}
    for call in (flat, nested):
        assert call_arguments(call, plain) == {"name": "board", "size": 4}
    target = ToolCall(name="evaluate", arguments={"target": 10})
    assert call_arguments(target, HUB) == {"target": 10}
    assert call_arguments(flat, {}) == flat.arguments
    alone = ToolCall(name="evaluate", arguments={"name": "max_number"})
    assert call_arguments(alone, HUB) == {"name": "max_number", "arguments": {}}


names = st.sampled_from(["url", "command", "env", "name", "arguments", "a"])
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
calls = st.builds(
    lambda arguments: {"name": "tool", "arguments": arguments}, st.dictionaries(names, json_values)
)
several_calls = st.lists(calls, min_size=1, max_size=2)
rows = st.lists(st.dictionaries(st.sampled_from([*task(), "x"]), json_values, max_size=5), max_size=3)


@settings(max_examples=30)
@given(st.lists(st.tuples(several_calls, several_calls, st.text(min_size=1)), min_size=1, max_size=3))
def test_tasks_survive_their_files(tmp_path_factory, parts):
    raw = [
        task(id=str(i), setup_tool=setup, evaluate_tool=evaluate, prompt=prompt)
        for i, (setup, evaluate, prompt) in enumerate(parts)
    ]
    folder = tmp_path_factory.mktemp("tasks")
    read = read_tasks(written(folder, raw))
    assert [one.model_dump(mode="json", exclude={"grade", "files"}) for one in read] == raw
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in raw)
    assert read_tasks(written(folder, lines, "tasks.jsonl")) == read


@settings(max_examples=50)
@given(json_values | rows)
def test_any_json_is_read_or_refused_in_words(tmp_path_factory, value):
    with contextlib.suppress(UsageError):
        read_tasks(written(tmp_path_factory.mktemp("any"), value))
