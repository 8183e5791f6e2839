"""The examples of docs/graders.md are graders, and pass what the page says that they pass."""

import json
import re
import sqlite3
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from tests.whole.docs.blocks import blocks

from buckeye.mcp.grading.judge import MadeCall, judge_calls, judge_results, judge_text
from buckeye.mcp.grading.reading import bound, read_graders
from buckeye.mcp.grading.state import judge_state

PAGE = (Path(__file__).parents[3] / "docs" / "graders.md").read_text(encoding="utf-8")
ADD = MadeCall(tool="add", arguments={"x": 1, "y": 2}, text="3")
OPEN, SAVE = (MadeCall(tool=name, arguments={}, text="done") for name in ("open", "save"))
FOUND = MadeCall(tool="search", arguments={}, text="It is Paris.")
TEXTS = {  # row -> a text that passes, one that does not
    "exact: done": (" done\n", "Done"),
    "contains: saved": ("It is saved.", "Saved"),
    'regex: "id-\\\\d+"': ("see id-17", "see id-x"),
    "number: 42": ("41, no, 42", "42 or 41"),
    "set: [red, blue]": ("blue, red", "red"),
    'math: "\\\\frac{1}{2}"': ("0.5", "2"),
    'json_path: "$.items[0].id"': ('{"items": [{"id": null}]}', '{"items": []}'),
}
KINDS = {
    "calls: {tool: add, arguments: {x: 1}}": ([ADD], [OPEN]),
    "calls: {at_most: 5}": ([ADD] * 5, [ADD] * 6),
    "calls: {in_order: [{tool: open}, {tool: save}]}": ([OPEN, ADD, SAVE], [SAVE, OPEN]),
    "result: {tool: search, contains: Paris}": ([FOUND, ADD], [ADD]),
}
STATES = ("state: {file:", "state: {database:")
OTHERS = ("reply: {...}", "state: {tool:", "state: {command:", "python: check.py:grade")


def rows(section):
    """What stands first in the rows of a section's tables."""
    text = PAGE[PAGE.index(f"\n## {section}\n") + 1 :].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)`", text, re.M)


def graders(written):
    found, problems = read_graders(yaml.safe_load(written))
    assert problems == []
    return found


def test_every_row_has_an_example_here():
    assert rows("What a text has to be") == list(TEXTS)
    kinds = [row for row in rows("Kinds") if not row.startswith((*STATES, *OTHERS))]
    assert kinds == list(KINDS)
    for row in rows("Kinds"):
        if row != OTHERS[0]:
            graders(row)


@pytest.mark.parametrize("row", TEXTS)
def test_what_a_text_has_to_be(row):
    if row.startswith("math") and find_spec("math_verify") is None:
        pytest.skip("needs the extra math")
    (grader,) = graders(f"reply: {{{row}}}")
    assert [judge_text(grader.reply, text).score for text in TEXTS[row]] == [1.0, 0.0]


@pytest.mark.parametrize("row", KINDS)
def test_what_calls_have_to_be(row):
    (grader,) = graders(row)
    judge, wanted = (judge_calls, grader.calls) if grader.calls else (judge_results, grader.result)
    assert [judge(wanted, calls).score for calls in KINDS[row]] == [1.0, 0.0]


def test_what_the_folder_has_to_be(tmp_path):
    by_file, by_query = (next(row for row in rows("Kinds") if row.startswith(start)) for start in STATES)
    found = [graders(row)[0].state for row in (by_file, by_query)]
    assert [judge_state(one, tmp_path).score for one in found] == [0.0, 0.0]
    (tmp_path / "out.txt").write_text("eggs, milk")
    with sqlite3.connect(tmp_path / "app.db") as database:
        database.executescript(
            "create table users (name, age); insert into users values ('Ann', 31), ('Bo', 9)"
        )
    assert [judge_state(one, tmp_path).score for one in found] == [1.0, 1.0]


def test_the_blocks_of_the_page(tmp_path):
    task, configuration, function = [block for block in blocks(PAGE) if block.language != "bash"]
    (grader,) = read_graders(json.loads(task.text)["grade"])[0]
    assert [judge_text(grader.reply, text).score for text in ("It is 42.", "It is 41.")] == [1.0, 0.0]
    answer, frugal = read_graders(yaml.safe_load(configuration.text)["grade"])[0]
    assert (answer.weight, frugal.name) == (3.0, "frugal")
    assert judge_text(bound(answer, {"answer": 7}).reply, "7").score == 1.0
    known = {}
    exec(function.text, known)
    (tmp_path / "list.txt").write_text("milk eggs")
    given = {"task": {"metadata": {"items": ["milk", "bread"]}}, "messages": [], "results": []}
    calls = [{"tool": "finish", "arguments": {}}]
    score, said = known["grade"](**given, calls=calls, workdir=tmp_path)
    assert (score, said) == (0.5, "found ['milk', 'eggs'], finished 1 times")
