"""Remote runs are listed from their first second, report the age of their status, and can be stopped fast."""

import json
import subprocess
import sys
from contextlib import nullcontext

import pytest

from buckeye.errors import RemoteError, RunError
from buckeye.remote import control
from buckeye.remote.control import RemoteRunRecorder, stop_left_job, stop_remote
from buckeye.run_files.directory import check_unused, lock_directory
from buckeye.run_files.known_runs import RemoteJob, register_run
from tests.remote.laptop import Laptop, wait_for
from tests.run.made_runs import made_run

NOWHERE = "root@127.0.0.1:1"


def job_at(target, folder, **changes):
    place = {
        "id": "ab12cd34",
        "pod": None,
        "target": target,
        "folder": str(folder / "job"),
        "python": sys.executable,
        "identity_file": None,
        "known_hosts": str(folder / "known"),
        "sent": (),
    }
    return RemoteJob(**{**place, **changes})


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def notes(tmp_path):
    output = tmp_path / "outputs" / "far"
    output.mkdir(parents=True)
    told = []
    made = RemoteRunRecorder(output, "ab12cd34", told.append)
    register_run(output, "ab12cd34")
    made.tell("Waiting for the pod: PROVISIONING 40%")
    return made, output


@pytest.mark.parametrize(
    ("held", "changes", "state", "reason"),
    [
        (True, {}, "starting", "Waiting for the pod: PROVISIONING 40%"),
        (False, {}, "failed", "the command that starts the run was killed during: Waiting for the pod"),
        (False, {"state": "over", "doing": "No offer fits."}, "failed", "No offer fits."),
    ],
)
def test_a_start_is_known_before_there_is_a_machine(notes, run_rl, held, changes, state, reason):
    made, output = notes
    made.update(**changes)
    with lock_directory(output) if held else nullcontext():
        for word in ("far", "ab12", "outputs/far"):
            seen = json.loads(run_rl("status", word, "--json")[1])
            assert (seen["run_id"], seen["state"], seen["stale"]) == ("ab12cd34", state, False)
            assert seen["reason"].startswith(reason)
        assert state in run_rl("list")[1]
        assert reason in run_rl("status", "far")[1]
    check_unused(output, resume_command="")  # nothing has run, so the same command may be repeated


def test_a_machine_that_was_lost_is_no_running_run(tmp_path, run_rl):
    output = made_run(tmp_path / "far", state="running", host="pod-1")
    made = RemoteRunRecorder(output, "aaaa1111", lambda _: None)
    made.update(state="running", job=job_at(NOWHERE, tmp_path))
    assert json.loads(run_rl("status", "far", "--json")[1])["state"] == "running"
    made.update(state="over", doing="Pod x is gone.")
    seen = json.loads(run_rl("status", "far", "--json")[1])
    assert (seen["state"], seen["reason"]) == ("failed", "Pod x is gone.")


def test_a_run_is_as_it_was_after_a_resume_that_came_to_nothing(tmp_path, run_rl):
    made = RemoteRunRecorder(made_run(tmp_path / "far", state="finished"), "aaaa1111", lambda _: None)
    with lock_directory(tmp_path / "far"):
        made.tell("Waiting for the pod")
        assert json.loads(run_rl("status", "far", "--json")[1])["state"] == "starting"
    made.update(state="over", doing="The price was not confirmed.")
    seen = json.loads(run_rl("status", "far", "--json")[1])
    assert (seen["state"], seen["reason"]) == ("finished", None)


def test_a_host_that_does_not_answer_is_told_within_seconds(tmp_path, monkeypatch, refusal, wording):
    monkeypatch.setattr(control, "_REACH_SECONDS", 0.5)
    output = made_run(tmp_path / "far", state="running", host="pod-1")
    RemoteRunRecorder(output, "aaaa1111", lambda _: None).update(
        state="running", job=job_at(NOWHERE, tmp_path, pod="buckeye-x")
    )
    told = []
    with refusal(RemoteError):
        stop_remote(output, now=False, timeout=None, tell=told.append)
    assert told[0] == wording


def test_resume_only_warns_of_a_host_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "_REACH_SECONDS", 0.5)
    output = made_run(tmp_path / "far", state="running", host="pod-1")
    made = RemoteRunRecorder(output, "aaaa1111", lambda _: None)
    made.update(state="running", job=job_at(NOWHERE, tmp_path))
    told = []
    assert not stop_left_job(output, tell=told.append)
    assert "nothing was stopped" in told[-1]
    made.update(state="over")
    assert not stop_left_job(output, tell=told.append)
    assert len(told) == 2


def test_a_stop_names_a_run_whose_process_is_unknown(tmp_path):
    output = made_run(tmp_path / "far", state="running", host="pod-1")
    with lock_directory(output):
        (output / ".lock").write_text("")  # as on a full disk
        with pytest.raises(RunError) as caught:
            stop_remote(output, now=False, timeout=None, tell=print)
    assert caught.value.code == "BK-RUN-ACTIVE"


WATCHER = """
import signal, sys, time
from pathlib import Path
from buckeye.remote.control import RemoteRunRecorder
from buckeye.run_files.directory import lock_directory

signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
with lock_directory(Path("far")):
    notes = RemoteRunRecorder(Path("far"), "ab12cd34", lambda _: None)
    notes.tell("running")
    while len(signals) < int(sys.argv[1]):
        time.sleep(0.02)
        if signals and not notes._remote_run.stopping:
            notes.update(stopping=True)
            notes.tell("Downloading the remaining files ...")
"""


@pytest.fixture
def watcher(tmp_path):
    """Process that watches a run and ends after the given number of signals."""
    started = []

    def start(signals):
        process = subprocess.Popen([sys.executable, "-c", WATCHER, str(signals)], cwd=tmp_path)
        started.append(process)
        path = tmp_path / "far" / "remote.json"
        wait_for(
            lambda: path.exists() and b'"running"' in path.read_bytes(), lambda: "no watcher", seconds=60
        )
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_stop_says_what_it_waits_for_and_can_be_hurried(tmp_path, watcher):
    watching = watcher(2)
    told = []

    def leave_while_it_fetches(line):
        told.append(line)
        if "Downloading" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_remote(tmp_path / "far", now=False, timeout=60, tell=leave_while_it_fetches)
    assert all(str(watching.pid) in line for line in told)
    with pytest.raises(KeyboardInterrupt):  # asked again, it only continues to wait
        stop_remote(tmp_path / "far", now=False, timeout=60, tell=leave_while_it_fetches)
    assert watching.poll() is None
    stop_remote(tmp_path / "far", now=True, timeout=60, tell=told.append)
    assert watching.wait(60) == 0  # one more signal; two would prevent an orderly end


@pytest.mark.e2e
@pytest.mark.slow
def test_a_command_is_seen_and_stopped_while_it_connects(tmp_path, model, monkeypatch):
    laptop = Laptop(tmp_path / "laptop", model)
    monkeypatch.delenv("XDG_STATE_HOME")
    running = laptop.start("--provider", "ssh", "--host", NOWHERE)
    try:
        wait_for(lambda: "Connecting to" in laptop.said(), laptop.said, seconds=120)
        (seen,) = json.loads(laptop.command("list", "--json"))
        assert (seen["name"], seen["state"]) == ("run", "starting")
        laptop.command("stop", "run")
        assert running.wait(60) == 130
        seen = json.loads(laptop.command("status", "run", "--json"))
        assert (seen["state"], seen["reason"]) == ("failed", "interrupted")
    finally:
        running.kill()
        running.wait()
