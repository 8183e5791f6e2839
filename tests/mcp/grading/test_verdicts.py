"""Hand-made rollouts for all kinds of graders, with hand-written scores and explanations."""

import hashlib
import json
import sqlite3

import pytest
from tests.mcp.grading.graders import problems_of, read_graders

from buckeye.mcp.grading import python_runner
from buckeye.mcp.grading.grader_parser import fill_metadata
from buckeye.mcp.grading.worker import judge_request

CALLS = [
    {"tool": "open", "arguments": {"path": "a.txt"}, "text": "opened"},
    {"tool": "add", "arguments": {"x": 1, "y": 2.0}, "text": "3", "data": {"sum": 3, "terms": [1, 2]}},
    {"tool": "add", "arguments": {"x": True}, "text": "x is no number", "error": True},
    {"tool": "save", "arguments": {"title": "Buy milk today"}, "text": '{"id": 7, "ok": true}'},
]
METADATA = {"answer": "1,234", "items": ["a", "b"], "deep": {"name": "a.b"}, "row": [[1, "Ann"]], "n": 2}


def graded(grade, folder=None, reply="", calls=CALLS):
    """Return the verdict of one grader, as the worker gives it."""
    (grader,) = read_graders(grade)
    given = fill_metadata(grader, METADATA).model_dump(mode="json", exclude_unset=True)
    request = {"grader": given, "text": reply, "calls": calls, "folder": str(folder)}
    return judge_request(json.loads(json.dumps(request)))


REPLIES = [
    ({"exact": "42"}, " 42\n", 1, "found '42'"),
    ({"exact": "42"}, "It is 42.", 0, "expected '42', found 'It is 42.'"),
    ({"exact": "Yes", "ignore_case": True}, "yes", 1, "found 'yes'"),
    ({"exact": "Yes"}, "yes", 0, "expected 'Yes', found 'yes'"),
    ({"exact": {"a": 1}}, '{"a": 1.0}', 1, "found"),
    ({"exact": {"a": 1}}, '{"a": true}', 0, 'expected {"a": 1}'),
    ({"exact": 5}, "five", 0, "expected 5, found 'five'"),
    ({"exact": None}, "null", 1, "found 'null'"),
    ({"exact": "{metadata.deep.name}"}, "a.b", 1, "found 'a.b'"),
    ({"contains": "milk"}, "Buy milk", 1, "found 'Buy milk'"),
    ({"contains": "MILK"}, "Buy milk", 0, "expected text with 'MILK'"),
    ({"contains": "MILK", "ignore_case": True}, "Buy milk", 1, "found"),
    ({"regex": r"id-\d+"}, "it has id-17", 1, "found"),
    ({"regex": r"^id-\d+$"}, "it has id-17", 0, "expected a match of"),
    ({"regex": "^{metadata.deep.name}$"}, "axb", 0, "expected a match of"),  # the dot is not a wildcard
    ({"number": 42}, "6 times 7 is 42", 1, "found"),
    ({"number": 42}, "42, not 41", 0, "expected the number 42, not 41"),
    ({"number": 42}, "none", 0, "expected the number 42, found 'none'"),
    ({"number": -4}, "x = -4", 1, "found"),
    ({"number": 4}, "pages 3-4", 1, "found"),
    ({"number": 1234.5}, "It costs $1,234.50.", 1, "found"),
    ({"number": 3.14, "tolerance": 0.01}, "about 3.149", 1, "found"),
    ({"number": 3.14, "tolerance": 0.01}, "about 3.2", 0, "expected the number 3.14 within 0.01, not 3.2"),
    ({"number": "{metadata.answer}"}, "1234", 1, "found"),
    ({"set": ["a", "b"]}, "b, a", 1, "found"),
    ({"set": ["a", "b"]}, "- a\n- c", 0, "missing: 'b'; not expected: 'c'"),
    ({"set": [1, 2]}, "[2, 1.0, 1]", 1, "found"),
    ({"set": [1, 2]}, "[true, 2]", 0, "missing: 1; not expected: true"),
    ({"set": "{metadata.items}"}, "a; b", 1, "found"),
    ({"json_path": "$.a[0]"}, 'Here:\n```json\n{"a": [5]}\n```', 1, "$.a[0] is 5"),
    ({"json_path": "$.b"}, '{"a": [5]}', 0, "no value at $.b"),
    ({"json_path": "$.a"}, "no JSON", 0, "expected JSON, found 'no JSON'"),
    ({"json_path": "$.a[*].n", "set": [1, 2]}, '{"a": [{"n": 2}, {"n": 1}]}', 1, "found [2, 1]"),
    ({"json_path": "$.a", "exact": 5}, '{"a": 5}', 1, "found 5"),
    ({"json_path": "$.a", "number": 5}, '{"a": 6}', 0, "expected the number 5, not 6"),
]
TOOLS = [
    ({"calls": {"tool": "add"}}, 1, "found 2 calls of add"),
    ({"calls": {"tool": "add", "at_least": 2}}, 0, "expected 2 calls of add, found 1 (1 more failed)"),
    ({"calls": {"tool": "add", "arguments": {"x": 1, "y": 2}}}, 1, "found 1 call of add with x=1, y=2"),
    ({"calls": {"tool": "add", "arguments": {"x": 5}}}, 0, "expected 1 call of add with x=5, found 0"),
    ({"calls": {"tool": "save", "matching": {"title": {"contains": "milk"}}}}, 1, "found 1"),
    ({"calls": {"tool": "save", "matching": {"body": {"contains": "milk"}}}}, 0, "expected 1"),
    ({"calls": {"tool": "drop", "at_most": 0}}, 1, "found 0 calls of drop"),
    ({"calls": {"at_most": 3}}, 0, "expected at most 3 calls, found 4"),
    ({"calls": {"at_most": 4}}, 1, "found 4 calls"),
    ({"calls": {"in_order": [{"tool": "open"}, {"tool": "save"}]}}, 1, "found 4 calls"),
    (
        {"calls": {"in_order": [{"tool": "save"}, {"tool": "open"}]}},
        0,
        "found 1 of 2 calls in order; missing: open",
    ),
    ({"result": {"tool": "save", "json_path": "$.id", "exact": 7}}, 1, "found 7"),
    ({"result": {"contains": '"ok"'}}, 1, "found"),
    ({"result": {"tool": "add", "number": 3}}, 0, "the last call of add failed: 'x is no number'"),
    ({"result": {"tool": "add", "json_path": "$.sum", "number": 3, "any": True}}, 1, "found 3"),
    ({"result": {"tool": "add", "number": 4, "any": True}}, 0, "none of 2 results passes"),
    ({"result": {"tool": "drop", "contains": "x"}}, 0, "no call of drop"),
]
TEXT = "bread\nmilk\n"
HASH = hashlib.sha256(TEXT.encode()).hexdigest()
ASK = {
    "database": "shop.db",
    "query": "SELECT id, name FROM users WHERE id > ? ORDER BY id",
    "parameters": [0],
}
STATES = [
    ({"file": "list.txt"}, 1, "list.txt exists"),
    ({"file": "none.txt"}, 0, "no such file: none.txt"),
    ({"file": "none.txt", "exists": False}, 1, "none.txt does not exist, as expected"),
    ({"file": "list.txt", "exists": False}, 0, "list.txt exists"),
    ({"file": "{workdir}/list.txt", "contains": "milk"}, 1, "found 'bread milk'"),
    ({"file": "list.txt", "set": ["milk", "eggs"]}, 0, "missing: 'eggs'; not expected: 'bread'"),
    ({"file": "sub/data.json", "json_path": "$.n", "number": "{metadata.n}"}, 1, "found 2"),
    ({"file": "list.txt", "sha256": HASH}, 1, "list.txt has the hash"),
    ({"file": "list.txt", "sha256": "0" * 64}, 0, "expected list.txt with the hash 000000000000"),
    ({**ASK, "rows": [[1, "Ann"], [2, "Bo"]]}, 1, "found the expected 2 rows"),
    ({**ASK, "rows": [[1, "Ann"], [2, "Bo"], [3, "Cy"]]}, 0, "expected 3 rows, found 2 rows"),
    ({**ASK, "rows": [[1, "Ann"], [2, "Bob"]]}, 0, 'row 2: expected [2, "Bob"], found [2, "Bo"]'),
    ({**ASK, "parameters": [1], "rows": "{metadata.row}"}, 0, 'row 1: expected [1, "Ann"], found [2, "Bo"]'),
    ({"database": "shop.db", "query": "SELECT count(*) FROM users", "number": 2}, 1, "found 2"),
    (
        {"database": "shop.db", "query": "SELECT * FROM no_table", "rows": []},
        0,
        "shop.db: the query failed: no such table",
    ),
    ({"database": "no.db", "query": "SELECT 1", "number": 1}, 0, "no such file: no.db"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    (folder / "list.txt").write_text(TEXT)
    (folder / "sub").mkdir()
    (folder / "sub/data.json").write_text('{"n": 2}')
    with sqlite3.connect(folder / "shop.db") as database:
        database.execute("PRAGMA journal_mode = wal")
        database.execute("CREATE TABLE users (id INTEGER, name TEXT)")
        database.executemany("INSERT INTO users VALUES (?, ?)", [(2, "Bo"), (1, "Ann")])
        database.commit()
        yield folder  # its newest rows are in the write-ahead log
    database.close()


@pytest.mark.parametrize(("test", "reply", "score", "explanation"), REPLIES)
def test_reply_grader_returns_score_and_explanation(test, reply, score, explanation):
    verdict = graded({"reply": test}, reply=reply)
    assert (verdict.score, verdict.explanation[: len(explanation)]) == (score, explanation)


@pytest.mark.parametrize(("grade", "score", "explanation"), TOOLS)
def test_calls_and_result_graders_return_score_and_explanation(grade, score, explanation):
    verdict = graded(grade)
    assert (verdict.score, verdict.explanation[: len(explanation)]) == (score, explanation)


@pytest.mark.parametrize(("state", "score", "explanation"), STATES)
def test_state_grader_returns_score_and_explanation(folder, state, score, explanation):
    verdict = graded({"state": state}, folder=folder)
    assert (verdict.score, verdict.explanation[: len(explanation)]) == (score, explanation)


@pytest.mark.slow  # the library takes seconds to import
@pytest.mark.parametrize(
    ("expected", "reply", "score"),
    [
        ("\\frac{1}{2}", "so it is 0.5", 1),
        ("1/2", "The answer is $\\frac{2}{4}$.", 1),
        ("1/2", "\\boxed{0.3}", 0),
        ("x^2 - 1", "$(x-1)(x+1)$", 1),
        ("\\sqrt{2}", "\\sqrt{2}", 1),
        ("3", "nothing", 0),
    ],
)
def test_math_grader_accepts_equal_values(expected, reply, score):
    assert graded({"reply": {"math": expected}}, reply=reply).score == score


@pytest.mark.parametrize(
    ("grade", "path"),
    [
        ({"reply": {"numbr": 3}}, ("reply", "numbr")),
        ([{"reply": {"exact": 1}}, {"stat": {}}], (1, "stat")),
        ({"reply": {"number": "x"}}, ("reply", "number")),
        ({"reply": {"number": True}}, ("reply", "number")),
        ({"reply": {"regex": "("}}, ("reply", "regex")),
        ({"reply": {"json_path": "$.a["}}, ("reply", "json_path")),
        ({"reply": {"exact": 1, "number": 2}}, ("reply", "exact")),
        ({"reply": {}}, ("reply",)),
        ({"reply": {"exact": 1}, "calls": {"at_most": 1}}, ("reply",)),
        ({"calls": {"in_order": [{"tol": "a"}]}}, ("calls", "in_order", 0, "tool")),
        ({"calls": {"arguments": {"x": 1}}}, ("calls",)),
        ({"state": {"file": "../x"}}, ("state", "file")),
        ({"state": {"file": "a", "tool": "b"}}, ("state", "file")),
        ({"state": {"file": "a", "query": "SELECT 1"}}, ("state", "query")),
        ({"state": {"database": "a", "query": "DELETE FROM t", "rows": []}}, ("state", "query")),
        ({"state": {"database": "a", "query": "SELECT 1; SELECT 2", "rows": []}}, ("state", "query")),
        ({"state": {"database": "a", "query": "SELECT 1"}}, ("state", "database")),
        ({"python": "check:grade"}, ("python",)),
        ({"weight": 0, "reply": {"exact": 1}}, ("weight",)),
        (5, ()),
        ([{"name": "a", "reply": {"exact": 1}}] * 2, ()),
    ],
)
def test_invalid_graders_are_reported(grade, path, wording):
    problem = problems_of(grade)[0]
    assert problem.path == ("grade", *path)
    assert str(problem) == wording


@pytest.mark.parametrize(
    "test",
    [
        {"exact": "{metadata.anser}"},
        {"number": "{metadata.deep}"},
        {"number": "{metadata.deep.name}"},
        {"contains": "- {metadata.items}"},
    ],
)
def test_fill_metadata_refuses_missing_or_unsuitable_values(test, refusal):
    (grader,) = read_graders({"reply": test})
    with refusal(ValueError):
        fill_metadata(grader, METADATA)


def test_function_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "check.py").write_text("def grade(**given):\n    return 1.0\n")
    (grader,) = read_graders({"python": "check.py:grade"}, tmp_path)
    assert grader.python == f"{tmp_path}/check.py:grade"
    with (tmp_path / "check.py").open("a") as file:
        file.write("async def later(**given):\n    return 1.0\n")
    for import_path, message in (
        ("none.py:grade", "cannot read"),
        ("check.py:grad", "Did you mean grade?"),
        ("check.py:later", "check.py:3: later is `async def`"),
    ):
        (problem,) = problems_of([{"python": import_path}], tmp_path)
        assert problem.path == ("grade", 0, "python")
        assert message in problem.message


GRADES = """import asyncio
async def later(): return 1.0
def nothing(**_): pass
def text(**_): return "good"
def coroutine(**_): return later()
def explained(**_): return later(), "because"
def thing(**_): return object()
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "nothing (check.py:3) returned None: expected a number"),
        ("text", "text (check.py:4) returned 'good': expected a number"),
        ("coroutine", "coroutine (check.py:5) returned a coroutine that was not awaited"),
        ("explained", "explained (check.py:6) returned a coroutine that was not awaited"),
        ("thing", "thing (check.py:7) returned <object object>: expected a number"),
    ],
)
def test_function_without_score_is_reported_with_its_line(tmp_path, function, message):
    (tmp_path / "check.py").write_text(GRADES)
    with pytest.raises(TypeError) as caught:
        python_runner._call_function(str(tmp_path / "check.py"), function, {"workdir": None})
    assert str(caught.value).startswith(message)
