"""Diagnosis of a process that has exited."""

import signal
import time

import pytest

from buckeye.launch import exit_reason as module
from buckeye.launch.exit_reason import (
    OomKills,
    describe_exit,
    exit_error_code,
    explain_exit,
    find_reported_error,
)
from tests.run.conftest import role

FEW = OomKills(in_cgroup=2, on_machine=5)


@pytest.fixture
def ended(processes):
    """Return a function that runs a program as the trainer and returns the exited child."""

    def run(code, *, kill=None):
        child = processes.start(role(code))
        if kill is not None:
            processes.kill(child, kill)
        child.process.wait()
        child.heartbeats.read(time.monotonic())
        return child

    return run


def say(child, tmp_path, memory=FEW):
    return explain_exit(child, child.returncode, memory, tmp_path)


def test_explain_exit_shows_exit_code_and_last_lines(ended, tmp_path, wording):
    child = ended("print('Step 3'); print('ValueError: bad'); raise SystemExit(7)")
    text = say(child, tmp_path)
    assert text == wording
    assert str(tmp_path / "logs" / "trainer.stdout") in text


@pytest.mark.parametrize(
    "counts",
    [
        OomKills(in_cgroup=3, on_machine=6),
        OomKills(in_cgroup=2, on_machine=6),
        OomKills(in_cgroup=None, on_machine=None),
        FEW,
    ],
    ids=["of the cgroup", "of the machine", "unknown", "neither"],
)
def test_explain_exit_names_out_of_memory_kills(ended, tmp_path, monkeypatch, counts, wording):
    monkeypatch.setattr(module.OomKills, "read", classmethod(lambda cls: counts))
    child = ended("import os; os.kill(os.getpid(), 9)")
    child.memory = 3_100_000_000
    assert say(child, tmp_path) == wording


def test_describe_exit_shows_number_of_unnamed_signal(ended, wording):
    child = ended("import os; os.kill(os.getpid(), 40)")
    assert describe_exit(child, child.returncode) == wording


def test_describe_exit_shows_reason_of_launcher_kill(ended, tmp_path, wording):
    child = ended("import time; time.sleep(60)", kill="sent no heartbeat for 31 s")
    assert child.returncode == -signal.SIGKILL
    assert describe_exit(child, child.returncode) == wording
    assert "sender unknown" not in say(child, tmp_path)
    assert exit_error_code(child) == "BK-RUN-STALLED"


def test_explain_exit_reports_full_disk(ended, tmp_path, monkeypatch, wording):
    monkeypatch.setattr(module, "free_bytes", lambda path: 1000)
    assert say(ended("raise SystemExit(1)"), tmp_path) == wording


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('12:00:01   ERROR RuntimeError: shape'); raise SystemExit(1)", "ERROR RuntimeError: shape"),
        ("print('12:00:01    INFO Starting step 3'); raise SystemExit(1)", None),  # no error: retry
        ("raise SystemExit(1)", None),
        ("print('error: x', flush=True); import os; os.kill(os.getpid(), 9)", None),
        ("raise SystemExit(130)", None),
    ],
)
def test_find_reported_error_reads_last_line_of_log(ended, code, expected):
    child = ended(code)
    named = find_reported_error(child, child.returncode)
    assert named == (f"trainer: {expected}" if expected else None)


def test_find_reported_error_prefers_heartbeat_to_log(ended, wording):
    code = "from buckeye.base import heartbeat; heartbeat.start(); "
    code += "heartbeat.failed('no batch', error='TransportError', final=False, code='BK-BATCH'); "
    code += "raise SystemExit('error: other')"
    child = ended(code)
    assert find_reported_error(child, child.returncode) == wording
    assert exit_error_code(child) == "BK-BATCH"
