"""Status of a run, compared with hand-computed numbers."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from buckeye.cli.run_texts import run_list, status_text
from buckeye.errors import RunError, UsageError
from buckeye.launch.waits import describe_wait, waits
from buckeye.run_files.record import ProcessRecord, read_record
from buckeye.runs.status import run_status
from buckeye.runs.stop import continuation, stop_run
from tests.run.made_runs import STARTED, made_run, recorded, write_metrics


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


def test_numbers_of_a_run(tmp_path):
    run = made_run(tmp_path / "run", checkpoints=(5, 10), restarts=2)
    for step in range(24):
        write_metrics(run, ("orchestrator", step, 10 * step, {"reward/mean": step / 100}))
    write_metrics(run, ("trainer", 0, -50, {}), *(("trainer", n, 20 * n, {}) for n in range(22)))
    (run / "logs").mkdir()
    (run / "logs" / "run.log").write_text(
        "2023-11-14 22:13:20,001 [trainer]   ERROR unlucky\n2023-11-14 22:13:21,001 [rl] WARNING never mind\n"
    )
    seen = run_status(run)
    assert (seen.state, seen.step, seen.max_steps, seen.restarts) == ("stopped", 22, 20, 2)
    assert seen.reward == 0.21  # not that of batch 23, which is not trained yet
    assert seen.reward_mean == pytest.approx(0.165)  # of 0.12 to 0.21
    assert seen.reward_change == pytest.approx(0.1)
    shown = "reward      0.2100 (mean of the last 10 steps: 0.1650, +0.1000 from the 10 before)"
    assert shown in status_text(seen, STARTED)
    assert seen.checkpoint_step == 10
    assert seen.last_step_time == STARTED + 420
    assert seen.last_error == "unlucky"
    assert seen.disk_used == sum(p.stat().st_size for p in run.rglob("*") if p.is_file())
    assert seen.seconds_left is None  # it is not running


def test_what_an_attempt_has_not_done_yet_is_not_shown_as_done(tmp_path):
    run = made_run(tmp_path / "run", attempt=2, start_step=2)
    for step in range(4):
        values = {"attempt": 1, "reward/mean": step / 10}
        write_metrics(run, ("orchestrator", step, step, values), ("trainer", step, step, values))
    seen = run_status(run)
    assert (seen.step, seen.reward, seen.reward_mean) == (2, 0.1, 0.05)
    write_metrics(run, ("orchestrator", 2, 9, {"attempt": 2, "reward/mean": 0.7}))
    assert (run_status(run).step, run_status(run).reward) == (2, 0.1)
    write_metrics(run, ("trainer", 2, 9, {"attempt": 2}))
    assert (run_status(run).step, run_status(run).reward) == (3, 0.7)


def test_the_last_error_of_a_failed_run_is_that_of_the_process_that_failed(tmp_path):
    said = "  | 2023-11-14 22:13:20,001 [trainer]   ERROR too little memory"
    for number, (last, expected) in enumerate(
        {
            "  | error: no such file": "no such file",
            "  | torch.OutOfMemoryError: CUDA": "torch.OutOfMemoryError: CUDA",
            said: "too little memory",
            "  | Killed": "of the log",
        }.items()
    ):
        reason = f"Trainer 0 failed with exit code 1. Its last lines (x):\n  | Step 3\n{last}\n  |   and more"
        run = made_run(tmp_path / str(number), state="failed", reason=reason)
        (run / "logs").mkdir()
        (run / "logs" / "run.log").write_text("2023-11-14 22:13:20,001 [trainer]   ERROR of the log\n")
        assert run_status(run).last_error == expected


def test_a_clock_that_is_set_changes_neither_the_state_nor_the_step_nor_the_time_left(
    tmp_path, sleeper, monkeypatch
):
    run = made_run(tmp_path / "run", state="running", launcher=recorded(sleeper), started=time.time() + 3600)
    offset = time.time() - STARTED
    seconds = [offset + 3000, offset + 3100, offset - 200, offset - 100, offset]  # back by an hour
    write_metrics(run, *(("trainer", step, at, {}) for step, at in enumerate(seconds)))
    created = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created(process) - 3600)
    seen = run_status(run)
    assert (seen.state, seen.step) == ("running", 5)
    assert seen.seconds_left == pytest.approx(15 * 100, abs=60)


def test_a_launcher_that_is_suspended_gone_or_another_process(tmp_path, sleeper):
    launcher = recorded(sleeper)
    run = made_run(tmp_path / "run", state="running", launcher=launcher)
    os.kill(sleeper.pid, signal.SIGSTOP)
    while run_status(run).state == "running":
        time.sleep(0.01)
    assert run_status(run).state == "paused"
    other = ProcessRecord(title="rl", pid=sleeper.pid, started=launcher.started - 60)
    assert run_status(made_run(tmp_path / "recycled", state="running", launcher=other)).state == "dead"
    sleeper.kill()
    while run_status(run).state != "dead":  # also while it is a zombie
        time.sleep(0.01)


def test_commands_quote_a_directory_with_a_space(tmp_path):
    run = made_run(tmp_path / "my run", state="running", launcher=None)
    assert f"buckeye rl resume '{run}'" in status_text(run_status(run), STARTED)
    finished = made_run(tmp_path / "my finished run", state="finished")
    with pytest.raises(UsageError) as raised:
        continuation(finished, [])
    assert f"buckeye rl resume '{finished}' --max-steps N" in raised.value.hint


def test_a_directory_without_a_record(tmp_path, refusal):
    with refusal(UsageError):
        run_status(tmp_path)
    (tmp_path / "status.json").write_text('{"run_id": 3}')
    with refusal(UsageError):
        run_status(tmp_path)


def process(title, doing="starts", on=None, since=None):
    return ProcessRecord(title=title, pid=1, started=STARTED, doing=doing, on=on, since=since)


def test_waits_merge_processes_of_one_kind(tmp_path, wording):
    processes = (
        process("inference 0", "serves 3 requests", since=STARTED + 4),
        process("inference 1"),
        process("orchestrator", "rollouts of batch 3", "inference", STARTED + 5),
        process("trainer 0", "batch 2", "orchestrator", STARTED + 7),
        process("trainer 1", "batch 2", "orchestrator", STARTED + 6),
    )
    run = made_run(tmp_path / "run", state="running", processes=processes)
    found = waits(read_record(run))
    assert [describe_wait(wait, STARTED + 27) for wait in found] == wording


@pytest.mark.parametrize(("age", "stale"), [(5, False), (7200, True)])
def test_a_state_has_an_age_and_is_called_stale(tmp_path, age, stale):
    """The launcher's host is remote, so the status depends only on the file."""
    run = made_run(tmp_path / "run", state="running", host="far-away")
    then = time.time() - age
    os.utime(run / "status.json", (then, then))
    seen = run_status(run)
    assert (seen.state, seen.stale, seen.seen) == ("running", stale, pytest.approx(then, abs=1e-3))
    text = status_text(seen, then + age)
    expected = "stale: last status running, on far-away, 2.0 h ago" if stale else "seen 5 s ago"
    assert expected in text
    assert ("stale (running)" in run_list([seen])) is stale
    finished = made_run(tmp_path / "over", run_id="bbbb2222", state="finished", host="far-away")
    os.utime(finished / "status.json", (then, then))
    assert not run_status(finished).stale


def test_a_stop_does_not_wait_for_a_host_that_is_gone(tmp_path):
    run = made_run(tmp_path / "run", state="running", host="far-away")
    os.utime(run / "status.json", (1e9, 1e9))
    told = []
    with pytest.raises(RunError, match="far-away"):
        stop_run(run, now=False, timeout=None, tell=told.append)
    assert not (run / "stop").exists()
