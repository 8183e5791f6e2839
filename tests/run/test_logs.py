"""Logs of several processes in chronological order, across midnight and across a resume."""

import json
from datetime import datetime

import pytest

from buckeye.errors import UsageError
from buckeye.run_files.directory import attempt_logs, link_log
from buckeye.run_files.logs import follow_logs, read_logs

START = datetime(2024, 3, 1, 23, 59, 50)


@pytest.fixture
def run(tmp_path):
    begin(tmp_path, 1)
    return tmp_path


def begin(run, attempt, started=START):
    path = run / "run.json"
    attempts = json.loads(path.read_text())["attempts"] if path.exists() else []
    attempts.append({"attempt": attempt, "started": started.timestamp(), "resumed_step": None})
    path.write_text(json.dumps({"run_id": "a", "attempt": attempt, "attempts": attempts}))
    attempt_logs(run, attempt).mkdir(parents=True)


def log(run, name, text, attempt=1):
    folder = run / "logs" if name == "run.log" else attempt_logs(run, attempt)
    with (folder / name).open("a") as file:
        file.write(text)
    if name != "run.log":
        link_log(run, attempt, name)


def texts(lines):
    return [(line.process, line.text) for line in lines]


def test_read_logs_orders_lines_across_midnight(run):
    log(run, "trainer.stdout", "23:59:55    INFO a\nTraceback\n00:00:03   ERROR d\n")
    log(run, "inference.stdout", "loading\n23:59:59    INFO b\n00:00:01    INFO c\nlast words")
    log(
        run,
        "run.log",
        "2024-03-01 12:00:00,000 [rl]    INFO of an earlier run\nand more of it\n"
        "2024-03-01 23:59:51,500 [rl]    INFO starting\n"
        "2024-03-01 23:59:55,100 [trainer]    INFO a\n"
        "2024-03-02 00:00:04,000 [rl]   ERROR Trainer 0 failed\n  | its last line\n",
    )
    lines = read_logs(run)
    assert texts(lines) == [
        ("inference", "loading"),
        ("rl", "23:59:51    INFO starting"),
        ("trainer", "23:59:55    INFO a"),
        ("trainer", "Traceback"),
        ("inference", "23:59:59    INFO b"),
        ("inference", "00:00:01    INFO c"),
        ("inference", "last words"),
        ("trainer", "00:00:03   ERROR d"),
        ("rl", "00:00:04   ERROR Trainer 0 failed"),
        ("rl", "  | its last line"),
    ]
    assert lines[-3].time == datetime(2024, 3, 2, 0, 0, 3).timestamp()


def test_read_logs_selects_process_or_kind(run, refusal):
    for name in ("trainer", "trainer_1", "inference"):
        log(run, f"{name}.stdout", f"{name}\n")
    assert texts(read_logs(run, process="trainer_1")) == [("trainer_1", "trainer_1")]
    assert [p for p, _ in texts(read_logs(run, process="trainer"))] == ["trainer", "trainer_1"]
    assert texts(read_logs(run, process="trainer 0")) == [("trainer", "trainer")]
    with refusal(UsageError):
        read_logs(run, process="trainee")


def test_read_logs_of_earlier_attempt(run):
    log(run, "trainer.stdout", "first\n")
    log(run, "inference.stdout", "23:59:58 one\n01:00:03 two\n")  # it outlives the attempt
    log(run, "run.log", "2024-03-01 23:59:51,000 [rl] INFO one\n2024-03-02 01:00:01,000 [rl] INFO two\n")
    begin(run, 2, datetime(2024, 3, 2, 1))
    log(run, "trainer.stdout", "second\n", attempt=2)
    assert {text for _, text in texts(read_logs(run))} == {"second", "01:00:01 INFO two", "01:00:03 two"}
    first = {"first", "23:59:51 INFO one", "23:59:58 one"}
    assert {text for _, text in texts(read_logs(run, attempt=1))} == first
    with pytest.raises(UsageError, match="from 1 to 2"):
        read_logs(run, attempt=3)


def test_follow_logs_continues_after_resume(run):
    log(run, "trainer.stdout", "23:59:55    INFO a\nhal")
    following = follow_logs(run)
    assert texts(next(following)) == [("trainer", "23:59:55    INFO a")]
    log(run, "trainer.stdout", "f\n")
    assert texts(next(following)) == [("trainer", "half")]
    assert next(following) == []
    log(run, "trainer.stdout", "the end\n")
    begin(run, 2, datetime(2024, 3, 3, 1))
    log(run, "trainer.stdout", "01:00:02    INFO new\n", attempt=2)
    new = next(following)
    assert texts(new) == [("trainer", "the end"), ("trainer", "01:00:02    INFO new")]
    assert new[-1].time == datetime(2024, 3, 3, 1, 0, 2).timestamp()
    assert next(following) == []
