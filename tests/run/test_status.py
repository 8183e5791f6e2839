"""What is said of a run, against numbers computed by hand."""

import os
import signal
import subprocess
import sys
import time

import pytest

from buckeye.errors import UsageError
from buckeye.run.record import ProcessRecord, read_record
from buckeye.run.status import run_status
from buckeye.run.waits import waits
from tests.run.made_runs import STARTED, made_run, recorded, write_metrics


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


def test_numbers_of_a_run(tmp_path):
    run = made_run(tmp_path / "run", checkpoints=(5, 10), restarts=2)
    for step in range(20):
        write_metrics(run, ("orchestrator", step, 10 * step, {"reward/mean": 0.1 if step < 10 else 0.3}))
    write_metrics(run, ("trainer", 0, -50, {}), ("trainer", 0, 10, {}), ("trainer", 1, 20, {}))
    (run / "logs").mkdir()
    (run / "logs" / "run.log").write_text(
        "2023-11-14 22:13:20,001 [trainer]   ERROR out of luck\n"
        "2023-11-14 22:13:21,001 [rl] WARNING never mind\n"
    )
    seen = run_status(run)
    assert (seen.state, seen.step, seen.max_steps, seen.restarts) == ("stopped", 2, 20, 2)
    assert seen.reward == 0.3
    assert seen.reward_change == pytest.approx(0.2)
    assert seen.checkpoint_step == 10
    assert seen.last_step_time == STARTED + 20
    assert seen.last_error == "out of luck"
    assert seen.disk_used == sum(p.stat().st_size for p in run.rglob("*") if p.is_file())
    assert seen.seconds_left is None  # it does not run


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


def test_time_left_is_at_the_pace_of_the_last_steps(tmp_path, sleeper):
    now = time.time()
    run = made_run(tmp_path / "run", state="running", launcher=recorded(sleeper), started=now - 1000)
    offset = now - STARTED
    write_metrics(run, *(("trainer", step, offset - 400 + 100 * step, {}) for step in range(5)))
    seen = run_status(run)
    assert seen.state == "running"
    assert seen.seconds_left == pytest.approx(15 * 100, abs=60)  # of 20 steps 5 are done


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
    while run_status(run).state != "dead":  # as a zombie, which nobody has waited for, too
        time.sleep(0.01)


def test_a_directory_without_a_record(tmp_path):
    with pytest.raises(UsageError, match=r"has no status\.json"):
        run_status(tmp_path)
    (tmp_path / "status.json").write_text('{"run_id": 3}')
    with pytest.raises(UsageError, match="cannot be read"):
        run_status(tmp_path)


@pytest.mark.parametrize(
    ("collected", "trained", "batch", "weights", "orchestrator", "trainer"),
    [
        (None, None, None, 0, ("inference", "rollouts of batch 0", 0), ("orchestrator", "batch 0", 0)),
        (0, None, 0, 0, ("inference", "rollouts of batch 1", 5), (None, "trains on batch 0", 7)),
        (1, None, 0, 0, ("trainer", "weights 1", 6), (None, "trains on batch 0", 7)),
        (1, 0, None, 1, ("inference", "rollouts of batch 2", 6), ("orchestrator", "batch 1", 8)),
        (19, 18, None, 19, (None, "all batches are written", 24), ("orchestrator", "batch 19", 26)),
    ],
)
def test_who_waits_for_whom(tmp_path, collected, trained, batch, weights, orchestrator, trainer):
    run = made_run(tmp_path / "run", state="running")
    (run / "weights" / f"step_{weights}").mkdir(parents=True)
    if batch is not None:
        arrived = run / "batches" / f"step_{batch}"
        arrived.mkdir(parents=True)
        os.utime(arrived, (STARTED + 7, STARTED + 7))
    records = [
        {step: {"time": STARTED + first + step} for step in range(0 if newest is None else newest + 1)}
        for newest, first in ((trained, 8), (collected, 5))
    ]
    found = waits(run, read_record(run), *records)
    assert [(w.who, w.whom, w.what, w.since - STARTED) for w in found] == [
        ("orchestrator", *orchestrator),
        ("trainer", *trainer),
    ]


def test_a_run_that_starts_waits_for_its_servers_first(tmp_path):
    processes = tuple(
        ProcessRecord(title=title, pid=1, started=0.0, ready=ready)
        for title, ready in (("inference 0", True), ("inference 1", False), ("orchestrator", False))
    )
    run = made_run(tmp_path / "run", state="starting", processes=processes)
    found = waits(run, read_record(run), {}, {})
    assert [(w.who, w.whom) for w in found] == [("inference 1", None), ("orchestrator", "inference 1")]
