"""What is said of a process that has ended."""

import signal
import sys
import time

import pytest

from buckeye.launch import why_it_ended as module
from buckeye.launch.plan import Role
from buckeye.launch.processes import Processes
from buckeye.launch.why_it_ended import Memory, diagnosis, how_it_ended, named_cause

FEW = Memory(in_cgroup=2, on_machine=5)


@pytest.fixture
def ended(tmp_path):
    """Runs a program as the trainer, and returns it when it has ended."""
    processes = Processes(tmp_path, {})

    def run(code, *, kill=None):
        argv = (sys.executable, "-c", code)
        child = processes.start(
            Role(kind="trainer", index=0, argv=argv, config_name="unused", log_name="trainer")
        )
        if kill is not None:
            processes.kill(child, kill)
        child.process.wait()
        child.heartbeats.read(time.monotonic())
        return child

    yield run
    for child in list(processes.children):
        processes.forget(child)


def say(child, tmp_path, memory=FEW):
    return diagnosis(child, child.returncode, memory, tmp_path)


def test_the_exit_code_and_the_last_lines(ended, tmp_path):
    child = ended("print('Step 3'); print('ValueError: bad'); raise SystemExit(7)")
    text = say(child, tmp_path)
    assert text.startswith("Trainer 0 failed with exit code 7. Its last lines (")
    assert text.endswith("  | Step 3\n  | ValueError: bad")
    assert str(tmp_path / "logs" / "trainer.stdout") in text


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (Memory(in_cgroup=3, on_machine=6), "the kernel killed it because memory ran out (the limit of this"),
        (
            Memory(in_cgroup=2, on_machine=6),
            "probably by the kernel because memory ran out: it has just",
        ),
        (Memory(in_cgroup=None, on_machine=None), "by someone, or by the kernel because memory ran out"),
        (FEW, "by someone, or by the kernel because memory ran out"),
    ],
)
def test_who_killed_it(ended, tmp_path, monkeypatch, counts, expected):
    monkeypatch.setattr(module.Memory, "now", classmethod(lambda cls: counts))
    child = ended("import os; os.kill(os.getpid(), 9)")
    child.memory = 3_100_000_000
    text = say(child, tmp_path)
    assert text.startswith(f"Trainer 0 was ended by SIGKILL; {expected}")
    assert "it last used 3.1 GB of memory" in text


def test_a_signal_without_a_name_is_told_by_its_number(ended):
    child = ended("import os; os.kill(os.getpid(), 40)")
    assert how_it_ended(child, child.returncode) == "Trainer 0 was ended by signal 40"


def test_the_counts_of_this_machine_can_be_read():
    counts = Memory.now()
    assert counts.on_machine is None or counts.on_machine >= 0


def test_what_the_launcher_killed_was_killed_by_nobody_else(ended, tmp_path):
    child = ended("import time; time.sleep(60)", kill="gave no sign of life for 31 s")
    assert child.returncode == -signal.SIGKILL
    assert how_it_ended(child, child.returncode) == "Trainer 0 gave no sign of life for 31 s and was killed"
    assert "by someone" not in say(child, tmp_path)


def test_a_full_disk_is_named(ended, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda path: 1000)
    assert f"the disk of {tmp_path} is full" in say(ended("raise SystemExit(1)"), tmp_path)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('12:00:01   ERROR RuntimeError: shape'); raise SystemExit(1)", "ERROR RuntimeError: shape"),
        ("print('12:00:01    INFO Starting step 3'); raise SystemExit(1)", None),  # no error: try again
        ("raise SystemExit(1)", None),
        ("print('error: x', flush=True); import os; os.kill(os.getpid(), 9)", None),
        ("raise SystemExit(130)", None),
    ],
)
def test_the_error_that_a_process_names(ended, code, expected):
    child = ended(code)
    named = named_cause(child, child.returncode)
    assert named == (f"trainer: {expected}" if expected else None)


def test_the_last_word_counts_more_than_the_log(ended):
    says = "from buckeye.base import heartbeat; heartbeat.start(); "
    says += "heartbeat.failed('no batch', error='TransportError', final=False); "
    says += "raise SystemExit('error: other')"
    child = ended(says)
    assert named_cause(child, child.returncode) == "trainer: no batch"
