"""Processes of real runs are killed and suspended; the runs continue or end, and leave no processes."""

import json
import os
import signal
import time

import pytest

from buckeye.run_files.record import read_record
from tests.run.conftest import processes_of
from tests.waiting import HANG, wait_for

pytestmark = pytest.mark.e2e
QUICK = ("--supervision.heartbeat-timeout", 4)
PATIENT = ("--trainer.dist-timeout-seconds", 7200, "--supervision.restart", "false")
SOON = ("--ckpt.interval", 3)


def child(runner, title, output="out"):
    """Return the run's current process of this title, or None."""
    known = {p.title: p for p in read_record(runner.root / output).processes}
    return known[title].process() if title in known else None


def trained(runner, output="out"):
    """Return the steps in the order in which they were trained, with repetitions."""
    path = runner.root / output / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line["step"] for line in lines if line["process"] == "trainer"]


def events(runner, output="out"):
    path = runner.root / output / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def of_kind(runner, kind, output="out"):
    return [event for event in events(runner, output) if event["event"] == kind]


def has_trained(runner, *, attempt):
    """Return True if the trainer of an attempt has done a step."""
    lines = (runner.root / "out" / "metrics.jsonl").read_text().splitlines()
    known = [(line["process"], line["attempt"]) for line in map(json.loads, lines)]
    return ("trainer", attempt) in known


def after(runner, steps):
    wait_for(lambda: len(trained(runner)) >= steps, f"step {steps}")


def tasks_of(runner, output, steps):
    """Return the ids of the trained tasks, by step."""
    return [sorted(line["task_id"] for line in runner.rollouts(output, n)) for n in range(steps)]


def ended_well(running):
    printed, _ = running.communicate()
    assert running.returncode == 0, printed
    assert "Traceback" not in printed
    return printed


def test_run_with_killed_trainer_equals_undisturbed_run(finished, runner, start):
    running = start(runner.rl("out", "--ckpt.interval", 1, steps=5, level=0))
    wait_for(lambda: of_kind(runner, "checkpoint"), "a checkpoint")
    child(runner, "trainer 0").send_signal(signal.SIGKILL)
    printed, _ = running.communicate()
    assert running.returncode == 0, printed
    (restart,) = of_kind(runner, "restart")
    assert restart["process"] == "trainer 0"
    weights = [one.root / "out/weights/step_5/model.safetensors" for one in (runner, finished)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not processes_of(runner.root / "out")


@pytest.mark.slow
def test_run_survives_killed_trainer_orchestrator_and_engine(runner, start):
    runner.ok(runner.rl("straight", steps=18, level=0))
    running = start(runner.rl("out", *SOON, steps=18, level=0))
    wait_for(lambda: of_kind(runner, "checkpoint"), "a checkpoint")
    child(runner, "trainer 0").send_signal(signal.SIGKILL)
    wait_for(lambda: has_trained(runner, attempt=2), "the next step")
    child(runner, "orchestrator").send_signal(signal.SIGKILL)
    wait_for(lambda: has_trained(runner, attempt=3), "the step after that")
    assert child_count(runner, "inference") == 1  # it kept running
    child(runner, "inference 0").send_signal(signal.SIGKILL)
    ended_well(running)
    assert sorted(set(trained(runner))) == list(range(18))
    assert tasks_of(runner, "out", 18) == tasks_of(runner, "straight", 18)
    weights = [runner.root / name / "weights/step_18/model.safetensors" for name in ("out", "straight")]
    assert weights[0].read_bytes() == weights[1].read_bytes()  # the runs are bitwise identical
    restarts = of_kind(runner, "restart")
    assert [event["process"] for event in restarts] == ["trainer 0", "orchestrator", "inference 0"]
    begun = [(event["attempt"], event["resumed_step"]) for event in of_kind(runner, "attempt")]
    assert [attempt for attempt, _ in begun] == [2, 3]
    assert 3 <= begun[0][1] < begun[1][1]
    assert child_count(runner, "inference") == 2
    out = runner.root / "out"
    assert os.readlink(out / "logs" / "trainer.stdout") == "attempt_3/trainer.stdout"
    assert not processes_of(out)


def child_count(runner, kind):
    """Return how many processes of a kind were started."""
    return len([e for e in of_kind(runner, "process") if e["process"].startswith(kind)])


@pytest.mark.slow
@pytest.mark.parametrize("title", ["inference 0", "orchestrator", "trainer 0"])
def test_suspended_process_is_restarted(runner, start, title):
    running = start(runner.rl("out", *QUICK, *SOON, steps=14))
    after(runner, 4)
    suspended = child(runner, title)
    suspended.send_signal(signal.SIGSTOP)
    ended_well(running)
    assert [event["process"] for event in of_kind(runner, "restart")] == [title]
    assert sorted(set(trained(runner))) == list(range(14))
    assert not suspended.is_running()
    assert not processes_of(runner.root / "out")


@pytest.mark.slow
def test_ranks_that_wait_for_a_failed_rank_are_killed(runner, start):
    running = start(runner.rl("out", "--trainer-gpu-ids", "1,2", *PATIENT, steps=9))
    wait_for(lambda: (runner.root / "out" / "status.json").exists() and child(runner, "trainer 1"), "a rank")
    child(runner, "trainer 1").suspend()
    wait_for(lambda: child(runner, "trainer 0").net_connections(), "its sibling waits for it")
    child(runner, "trainer 1").send_signal(signal.SIGKILL)
    printed, _ = running.communicate()
    assert running.returncode == 1
    assert "SIGKILL" in printed


@pytest.mark.slow
def test_launcher_restarts_deadlines_after_suspension(runner, start):
    running = start(runner.rl("out", *QUICK, steps=4000))
    after(runner, 1)
    before = {p.pid for p in read_record(runner.root / "out").processes}
    running.send_signal(signal.SIGSTOP)
    time.sleep(8)
    steps = len(trained(runner))
    running.send_signal(signal.SIGCONT)
    after(runner, steps + 2)
    time.sleep(2)
    assert {p.pid for p in read_record(runner.root / "out").processes} == before
    running.send_signal(signal.SIGINT)
    printed, _ = running.communicate()
    assert running.returncode == 130, printed


@pytest.mark.slow
def test_run_resumes_after_its_launcher_is_killed(runner, start):
    first = start(runner.rl("out", steps=4000))
    after(runner, 2)
    first.kill()  # before the first checkpoint
    runner.ok(runner.rl("out", "--resume", *SOON, steps=4))
    assert trained(runner)[-4:] == [0, 1, 2, 3]
    second = start(runner.rl("out", "--resume", *SOON, steps=4000))
    wait_for(lambda: max(trained(runner), default=0) > 8, "further steps")
    second.kill()
    runner.ok(runner.rl("out", "--resume", *SOON, steps=max(trained(runner)) + 4))
    steps = trained(runner)
    assert sorted(set(steps)) == list(range(max(steps) + 1))
    assert not processes_of(runner.root / "out")
    nothing = runner.run(runner.rl("empty", "--resume"))
    assert nothing.returncode == 1


@pytest.mark.slow
def test_run_ends_if_its_directory_is_moved(runner, start):
    running = start(runner.rl("out", steps=1000))
    after(runner, 1)
    (runner.root / "out").rename(runner.root / "moved")
    printed, _ = running.communicate(timeout=HANG)
    assert running.returncode == 1
    assert "BK-RUN-MISMATCH" in printed
    assert not processes_of(runner.root / "out")


@pytest.mark.slow
def test_stall_is_reported_with_waits_and_stacks(runner, start):
    source = (runner.root / "letters.py").read_text()
    waits = "if task.id == 'train-9':\n            import asyncio\n            await asyncio.sleep(1000)\n"
    (runner.root / "letters.py").write_text(source.replace("reply = await", f"{waits}        reply = await"))
    running = start(runner.rl("out", "--supervision.stall-timeout", 40, steps=500))
    wait_for(lambda: told(runner, "trainer waits for batch"), "the notice of a stall")
    assert told(runner, "orchestrator waits for rollouts of batch")
    log = runner.root / "out" / "logs"
    wait_for(lambda: "most recent call first" in (log / "trainer.stdout").read_text(), "the stacks")
    running.send_signal(signal.SIGINT)
    running.communicate()
    assert not of_kind(runner, "restart")


def told(runner, beginning):
    """Return True if a stall was reported with a line that begins with `beginning`."""
    return any(wait.startswith(beginning) for stall in of_kind(runner, "stall") for wait in stall["waits"])


@pytest.mark.slow
def test_trainer_ranks_restart_together(runner, start):
    words = ("--trainer-gpu-ids", "1,2", *SOON)
    running = start(runner.rl("out", *words, steps=9))
    after(runner, 4)
    child(runner, "trainer 1").send_signal(signal.SIGKILL)
    ended_well(running)
    assert sorted(set(trained(runner))) == list(range(9))
    assert child_count(runner, "trainer") == 4
