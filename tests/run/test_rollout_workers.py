"""A run whose rollouts run in worker processes trains, also after a worker was killed."""

import os
import signal

import psutil
import pytest

from buckeye.monitor.metrics import RECORD_KEYS
from buckeye.runs.status import run_status
from tests.run.conftest import processes_of
from tests.waiting import wait_for
from tests.whole.docs.reference_tool import reference


def rollout_workers(running):
    return [
        process
        for process in psutil.Process(running.pid).children(recursive=True)
        if "buckeye.cli.rollout_worker" in process.cmdline()
    ]


@pytest.mark.e2e
def test_a_run_with_rollout_workers_trains(runner, start):
    running = start(runner.rl("out", "--orchestrator.workers", 2, "--orchestrator.eval", steps=20))
    wait_for(lambda: len(runner.metrics("out", "trainer")) >= 2, "the second step")
    workers = rollout_workers(running)
    assert len(workers) == 2
    listed = [
        (process.title, process.pid)
        for process in run_status(runner.root / "out").processes
        if process.restarts is None
    ]
    assert listed == [(f"rollouts {index}", worker.pid) for index, worker in enumerate(workers)]
    os.kill(workers[0].pid, signal.SIGKILL)
    printed, _ = running.communicate()
    assert running.returncode == 0, printed
    records = runner.metrics("out", "orchestrator")
    assert records[19]["workers/restarts"] == 1
    assert records[19]["reward/mean"] > records[0]["reward/mean"]
    assert records[19]["inference/0/tokens"] >= sum(
        rollout["completion_tokens"] for step in range(20) for rollout in runner.rollouts("out", step)
    )
    assert reference.unknown_metrics("orchestrator", set(records[19]) - set(RECORD_KEYS)) == set()
    assert runner.metrics("out", "eval")[20]["eval/letters/num"] == 40
    assert not processes_of(runner.root / "out")
    assert not any(worker.is_running() for worker in workers)
