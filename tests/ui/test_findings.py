"""Findings of `rl diagnose` on the page."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from buckeye.ui.findings import findings_of, stop
from buckeye.ui.run_catalog import OpenRun
from tests.ui.made import make_run
from tests.waiting import HANG, wait_for


@pytest.mark.slow
def test_findings_are_those_of_rl_diagnose(tmp_path):
    path = make_run(tmp_path / "run", state="failed")
    event = '{"time": 1700000100, "event": "failure", "attempt": 1, "cause": "out of memory"}\n'
    with (path / "events.jsonl").open("a") as file:
        file.write(event)
    run = OpenRun("run", path)
    told = findings_of(run)
    assert told["step"] == 3
    first = told["findings"][0]
    assert (first["name"], first["confidence"], first["cause"]) == ("failed", "sure", "out of memory")
    with mock.patch("buckeye.ui.findings._diagnose", side_effect=AssertionError):
        assert findings_of(run) == told  # nothing has changed


def test_a_diagnosis_that_fails_is_no_end_of_the_page(tmp_path, wording):
    run = OpenRun("run", make_run(tmp_path / "run", tokens=False))
    with mock.patch("buckeye.ui.findings.PYTHON", ("/bin/false",)):
        assert findings_of(run)["missing"] == wording


def test_a_slow_diagnosis_holds_up_neither_another_run_nor_another_question(tmp_path):
    runs = [OpenRun(name, make_run(tmp_path / name, tokens=False)) for name in ("slow", "quick")]
    begun, end = threading.Event(), threading.Event()

    def diagnose(run):
        if run.name == "slow":
            begun.set()
            assert end.wait(HANG)
        return {"findings": [], "missing": run.name}

    with mock.patch("buckeye.ui.findings._diagnose", diagnose), ThreadPoolExecutor() as pool:
        slow = pool.submit(findings_of, runs[0])
        assert begun.wait(HANG)
        assert pool.submit(findings_of, runs[1]).result(HANG)["missing"] == "quick"
        assert len(runs[0].steps) == 4
        end.set()
        assert slow.result(HANG)["missing"] == "slow"


def test_a_stop_ends_running_diagnoses_and_starts_no_waiting_ones(tmp_path):
    runs = [OpenRun(str(n), make_run(tmp_path / str(n), tokens=False)) for n in range(4)]
    started = tmp_path / "started"
    program = ("/bin/sh", "-c", f"echo one >> {started}; exec sleep 600")
    with (
        mock.patch("buckeye.ui.findings.PYTHON", program),
        mock.patch("buckeye.ui.findings._stopping", threading.Event()),
        ThreadPoolExecutor() as pool,
    ):
        answers = [pool.submit(findings_of, run) for run in runs]
        wait_for(lambda: started.exists() and len(started.read_text().split()) == 2)
        stop()
        assert all(answer.result(HANG)["missing"] for answer in answers)
    assert started.read_text().split() == ["one", "one"]
