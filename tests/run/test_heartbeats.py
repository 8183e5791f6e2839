"""Heartbeats that a process sends, and the state that the launcher reads from them."""

import os
import signal
import time

import pytest

from buckeye.base.process import RunIdentity
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.launch.processes import Processes
from buckeye.launch.recorder import Recorder
from tests.run.conftest import role
from tests.waiting import wait_for

HEARTBEATS = """
import os, time
from buckeye.base import heartbeat
heartbeat.start()
"""


def start(processes, code):
    processes.set_attempt(RunIdentity(run_id="a", attempt=3))
    return processes.start(role(HEARTBEATS + code))


def listen(child, condition):
    def heard():
        child.heartbeats.read(time.monotonic())
        return condition()

    wait_for(heard, more=child.stdout.read_text)


def doing(child):
    newest = child.heartbeats.newest
    return (newest.doing, newest.on) if newest is not None else None


def test_heartbeats_of_work_are_progress_and_of_waits_are_not(processes, tmp_path):
    seen = tmp_path / "seen"
    child = start(
        processes,
        f"""
for _ in range(3):
    heartbeat.report("trains")
heartbeat.ready()
while not os.path.exists({str(seen)!r}):
    heartbeat.report("batch 4", on="orchestrator")
    time.sleep(0.01)
heartbeat.report("trains")
time.sleep(60)
""",
    )
    listen(child, lambda: child.heartbeats.ready)
    assert doing(child) == ("trains", None)
    assert child.heartbeats.newest.progress == 3
    listen(child, lambda: doing(child) == ("batch 4", "orchestrator"))
    assert child.heartbeats.newest.progress == 4
    waited_since = child.heartbeats.newest.since
    seen.touch()
    listen(child, lambda: doing(child) == ("trains", None))
    assert child.heartbeats.newest.progress == 5
    assert child.heartbeats.newest.since > waited_since


def test_suspended_process_is_silent_until_it_continues(processes):
    child = start(processes, "time.sleep(60)")
    listen(child, lambda: child.heartbeats.last_heartbeat is not None)
    child.process.signal(signal.SIGSTOP, session=False)
    time.sleep(1.2)  # let heartbeats in flight arrive
    child.heartbeats.read(time.monotonic())
    heard = child.heartbeats.last_heartbeat
    time.sleep(1.5)
    child.heartbeats.read(time.monotonic())
    assert child.heartbeats.last_heartbeat == heard
    child.process.signal(signal.SIGCONT, session=False)
    listen(child, lambda: child.heartbeats.last_heartbeat > heard)


def test_heartbeats_do_not_block_if_the_pipe_is_full(processes):
    child = start(
        processes,
        """
for number in range(5000):  # more than a pipe holds
    heartbeat.report("x" * 100 + str(number))
    heartbeat.ready()
print("all said", flush=True)
time.sleep(60)
""",
    )
    wait_for(lambda: "all said" in child.stdout.read_text())
    listen(
        child, lambda: child.heartbeats.newest is not None and child.heartbeats.newest.doing.endswith("4999")
    )


def test_stacks_are_written_on_request(processes):
    child = start(processes, "def hangs():\n    time.sleep(60)\nheartbeat.ready()\nhangs()")
    listen(child, lambda: child.heartbeats.ready)
    processes.request_stacks(child)
    wait_for(lambda: "in hangs" in child.stdout.read_text())
    assert child.running


def test_failure_is_read_after_the_process_has_ended(processes):
    child = start(
        processes,
        "heartbeat.failed('unknown: ' + 'ä\\n' * 4000, error='FinalRunError', final=True, code='BK-RUN'); "
        "heartbeat.leave(1)",
    )
    assert child.process.wait() == 1
    child.heartbeats.read(time.monotonic())
    failure = child.heartbeats.failure
    assert failure.message.startswith("unknown: ä\n")
    assert (failure.error, failure.final) == ("FinalRunError", True)


def test_child_processes_do_not_inherit_the_heartbeat_pipe(processes):
    child = start(
        processes,
        """
import os, subprocess, sys
code = "import os; print(os.environ.get('BUCKEYE_HEARTBEAT_FD'), *os.listdir('/proc/self/fd'))"
subprocess.run([sys.executable, "-c", code], close_fds=False)
""",
    )
    child.process.wait()
    variable, *open_files = child.stdout.read_text().split()
    assert variable == "None"
    assert max(map(int, open_files)) <= 3


def test_logs_of_attempt_are_linked_at_stable_path(processes, tmp_path):
    for attempt, code in ((3, "print('first')"), (4, "print('second')")):
        processes.set_attempt(RunIdentity(run_id="a", attempt=attempt))
        processes.start(role(code)).process.wait()
    logs = tmp_path / "logs"
    assert (logs / "attempt_3" / "trainer.stdout").read_text() == "first\n"
    assert (logs / "trainer.stdout").read_text() == "second\n"
    assert os.readlink(logs / "trainer.stdout") == "attempt_4/trainer.stdout"


@pytest.mark.parametrize(("kind", "has_key"), [("orchestrator", True), ("gateway", True), ("trainer", False)])
def test_the_gateway_expects_the_key_that_rollouts_send(tmp_path, kind, has_key):
    code = "from buckeye.base.process import receive_secrets; receive_secrets(); import os; "
    started = Processes(tmp_path, {"BUCKEYE_API_KEY": "made-for-this-run"})
    child = started.start(role(f"{code}print(os.environ.get('BUCKEYE_API_KEY'))", kind=kind))
    assert child.process.wait() == 0
    assert child.stdout.read_text().split() == ["made-for-this-run" if has_key else "None"]


def test_run_without_its_trainer_is_not_ready(processes, tmp_path):
    """Between an early failure of the trainer and its restart, only the servers are left."""
    config = load_config(RLConfig, ["--trainer", "--orchestrator", "--output-dir", str(tmp_path)])
    recorder = Recorder(config, RunIdentity(run_id="local", attempt=1), ["new"], None, earlier=None)
    code = f"{HEARTBEATS}heartbeat.ready()\ntime.sleep(60)"
    server = processes.start(role(code, kind="inference"))
    listen(server, lambda: server.heartbeats.ready)
    recorder.observe(processes)
    assert recorder.record.state == "starting"
    trainer = processes.start(role(code))
    listen(trainer, lambda: trainer.heartbeats.ready)
    recorder.observe(processes)
    assert recorder.record.state == "running"
