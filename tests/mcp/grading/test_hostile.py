"""Files and states that a model may leave for a grader: no harm, and a verdict in time."""

import asyncio
import json
import os
import sqlite3
import sys
import uuid

import pytest
from tests.mcp.environment.leaks import processes_with
from tests.mcp.grading.graders import read_graders
from tests.waiting import wait_for

from buckeye.mcp.client.session import CallResult
from buckeye.mcp.grading import grader_processes
from buckeye.mcp.grading.grade import FinishedRollout, run_grader
from buckeye.mcp.grading.grader_processes import GraderError
from buckeye.mcp.grading.judge import RecordedCall


def graded(grade, folder, reply="", calls=(), files=None):
    (grader,) = read_graders(grade, files)

    async def call_tool(tool, arguments, seconds):
        return CallResult(text=f"{tool} {json.dumps(arguments)}")

    played = FinishedRollout(
        task={"id": "one", "prompt": "Do.", "metadata": {"items": ["a", "b"]}},
        messages=[{"role": "user", "content": "Do."}],
        reply=reply,
        calls=calls,
        workdir=folder,
        call_tool=call_tool,
    )
    return asyncio.run(run_grader(grader, played))


SECRET = "a-secret-of-the-host"


@pytest.fixture
def folder(tmp_path):
    """A rollout's folder with hostile content, next to secrets outside of it."""
    (tmp_path / "outside.txt").write_text(SECRET)
    with sqlite3.connect(tmp_path / "outside.db") as outside:
        outside.execute("CREATE TABLE t (x)")
        outside.execute("INSERT INTO t VALUES (?)", [SECRET])
    outside.close()
    work = tmp_path / "work"
    work.mkdir()
    (work / "line.txt").write_text("x" * 5_000_000)
    (work / "huge.txt").write_bytes(b"x" * (17 * 2**20))
    (work / "binary").write_bytes(bytes(range(256)) * 100)
    (work / "link.txt").symlink_to(tmp_path / "outside.txt")
    (work / "folder").symlink_to(tmp_path)
    (work / "link.db").symlink_to(tmp_path / "outside.db")
    os.mkfifo(work / "pipe")
    (work / "deep.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    (work / "no.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with sqlite3.connect(work / "own.db") as own:
        own.execute("CREATE TABLE t (x)")
        own.execute("CREATE VIEW w AS SELECT load_extension('/tmp/x') AS x")
    own.close()
    return work


LARGE = "SELECT zeroblob(1000000000)"
WRITES = "WITH n(i) AS (SELECT 1) INSERT INTO t SELECT i FROM n"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "score", "explanation"),
    [
        ({"file": "line.txt", "regex": "^x+$"}, 1, "found 'xxx"),
        ({"file": "line.txt", "regex": "^(x|x?)+[yz]$"}, 0, ""),
        ({"file": "huge.txt", "contains": "x"}, 0, "huge.txt is larger than 16 MiB"),
        ({"file": "binary", "contains": "x"}, 0, "binary is not UTF-8 text"),
        ({"file": "link.txt", "contains": "secret"}, 0, "link.txt is behind a symbolic link"),
        ({"file": "folder/outside.txt", "contains": "secret"}, 0, "folder/outside.txt is behind a symbolic"),
        ({"file": "pipe", "contains": "x"}, 0, "pipe is not a regular file"),
        ({"file": "deep.json", "json_path": "$..a"}, 0, ""),
        ({"database": "no.db", "query": "SELECT * FROM t", "rows": []}, 0, "no.db: the query failed"),
        ({"database": "link.db", "query": "SELECT * FROM t", "rows": []}, 0, "link.db is behind a symbolic"),
        ({"database": "own.db", "query": "SELECT x FROM w", "rows": []}, 0, "own.db: the query failed"),
        ({"database": "own.db", "query": ENDLESS, "rows": []}, 0, "own.db: the query failed: timeout"),
        ({"database": "own.db", "query": LARGE, "rows": []}, 0, "own.db: the query failed"),
        ({"database": "own.db", "query": WRITES, "rows": []}, 0, "own.db: the query failed: not authorized"),
    ],
)
def test_hostile_files_get_a_verdict_without_leaks(folder, state, score, explanation):
    before = (folder / "own.db").read_bytes()
    verdict = graded({"state": state}, folder)
    assert (verdict.score, verdict.explanation[: len(explanation)]) == (score, explanation)
    assert SECRET not in verdict.explanation
    assert (folder / "own.db").read_bytes() == before


def test_a_query_that_does_not_fit_its_database_is_no_verdict(folder):
    with pytest.raises(GraderError):
        graded({"state": {"database": "own.db", "query": "SELECT y FROM t", "rows": []}}, folder)


def test_a_missing_table_is_a_verdict(folder):
    query = {"state": {"database": "own.db", "query": "SELECT x FROM orders", "rows": []}}
    assert graded(query, folder).score == 0


@pytest.mark.parametrize(
    ("match", "reply"),
    [
        ({"json_path": "$.a", "number": 5}, f'{{"a": 1{"0" * 400}}}'),
        ({"json_path": "$.a", "number": 5}, '"a text with a {"'),
    ],
)
def test_json_that_is_no_number_scores_0(folder, match, reply):
    assert graded({"reply": match}, folder, reply).score == 0


def test_deep_and_long_calls_score_0(folder):
    deep = {"x": 1}
    for _ in range(400):
        deep = {"x": deep}
    calls = [RecordedCall(tool="add", arguments=deep, text="9" * 1_000_000)]
    assert graded({"calls": {"tool": "add", "arguments": {"x": 1}}}, folder, calls=calls).score == 0
    assert graded({"result": {"number": 1}}, folder, calls=calls).score == 0


@pytest.mark.slow
def test_command_grader_checks_output_and_exit_code(folder):
    shows = "import os, sys; print(os.getcwd(), sys.argv[1], sorted(os.environ))"
    ok = [sys.executable, "-c", shows, "{workdir}"]
    assert graded({"state": {"command": ok, "contains": f"{folder} {folder}"}}, folder).score == 1.0
    for code in ("raise SystemExit(3)", "input()"):
        assert graded({"state": {"command": [sys.executable, "-c", code]}}, folder).score == 0.0
    slow = {"state": {"command": [sys.executable, "-c", "import time; time.sleep(60)"]}, "timeout": 0.5}
    assert "0.5 s" in graded(slow, folder).explanation
    with pytest.raises(GraderError, match="no-such-program") as caught:
        graded({"state": {"command": ["no-such-program"]}}, folder)
    assert caught.value.code == "BK-GRADER"
    assert caught.value.message.count("cannot run") == 1


@pytest.mark.parametrize("script", ["./solution", "exit 125"])
def test_command_that_runs_a_missing_program_scores_0(folder, script):
    """A shell ends with 127 if the program, which the model has to write, is missing."""
    assert graded({"state": {"command": ["sh", "-c", script]}}, folder).score == 0


def test_unconfined_command_ends_with_its_children(folder, monkeypatch):
    monkeypatch.setattr(grader_processes, "confine_argv", lambda argv, **_: argv)
    monkeypatch.setattr(grader_processes, "build_confine_env", lambda variables: variables)
    marker = f"marker-{uuid.uuid4()}"
    starts = (
        "import subprocess, sys; argv = [sys.executable, '-c', 'import time; time.sleep(60)', sys.argv[1]]; "
        "subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL)"
    )
    command = [sys.executable, "-c", starts, marker]
    assert graded({"state": {"command": command}}, folder).score == 1.0
    wait_for(lambda: processes_with(marker) == [], "the end of all children")


def test_command_sees_no_keys_and_no_home(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    shows = [sys.executable, "-c", "import os; print('OPENAI_API_KEY' in os.environ, os.environ['HOME'])"]
    verdict = graded({"state": {"command": shows, "contains": "False"}}, folder)
    assert verdict.score == 1.0
    assert os.environ["HOME"] not in verdict.explanation.split()


@pytest.mark.slow
def test_python_grader_returns_score_or_raises(folder, tmp_path):
    (tmp_path / "check.py").write_text(
        "import os, time\n"
        "def share(task, messages, calls, results, workdir):\n"
        "    found = [call['arguments']['x'] for call in calls if call['tool'] == 'add']\n"
        "    wanted = task['metadata']['items']\n"
        "    return len(set(found) & set(wanted)) / len(wanted), f'found {found}, {results[0][\"text\"]}'\n"
        "def there(workdir, **_):\n    return (workdir / 'line.txt').exists()\n"
        "def fails(**_):\n    return {}['key']\n"
        "def leaves(**_):\n    os._exit(0)\n"
        "def words(**_):\n    return 'good'\n"
        "def hangs(**_):\n    time.sleep(60)\n"
    )
    calls = [RecordedCall(tool="add", arguments={"x": "a"}, text="added")]
    share = graded({"python": "check.py:share"}, folder, calls=calls, files=tmp_path)
    assert share == (0.5, "found ['a'], added")
    assert graded({"python": "check.py:there"}, folder, files=tmp_path).score == 1.0
    for function, message in (
        ("fails", r"KeyError: 'key' \(check.py:9\)"),
        ("leaves", "exited with code 0 and without a result"),
        ("words", r"words \(check.py:12\) returned 'good': expected a number"),
        ("hangs", "no result within 1 s"),
    ):
        seconds = 1.0 if function == "hangs" else 60.0
        with pytest.raises(GraderError, match=message):
            graded({"python": f"check.py:{function}", "timeout": seconds}, folder, files=tmp_path)


def test_state_grader_calls_its_tool(folder):
    asked = {"tool": "read", "arguments": {"id": 1}, "contains": '"id": 1'}
    assert graded({"state": asked}, folder) == (1.0, "found 'read {\"id\": 1}'")
