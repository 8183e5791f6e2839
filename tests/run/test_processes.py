"""Processes of a launcher: remains of their sessions, and signals meant for other processes."""

import os
import signal
import subprocess
import sys

import psutil

from buckeye.launch import processes as processes_module
from tests.run.conftest import role
from tests.waiting import wait_for

LEAVES_ONE_BEHIND = (
    "import subprocess, sys;"
    "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']);"
    "print(left.pid, flush=True)"
)
UNDER_NOHUP = """
import os, signal
signal.signal(signal.SIGHUP, signal.{disposition})
from buckeye.base.process import StopFlag
stop = StopFlag().install()
os.kill(os.getpid(), signal.SIGHUP)
print(stop.requested)
os.kill(os.getpid(), signal.SIGTERM)
print(stop.requested)
"""


def test_grandchildren_end_with_their_process(processes):
    child = processes.start(role(LEAVES_ONE_BEHIND))
    wait_for(lambda: child.returncode is not None)
    left = int(child.stdout.read_text())
    wait_for(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE)


def test_ended_process_gets_no_signal(processes, monkeypatch):
    child = processes.start(role("pass"))
    wait_for(lambda: not child.running)
    signalled = []
    monkeypatch.setattr(processes_module.os, "killpg", lambda *words: signalled.append(words))
    processes.request_stop([child])
    processes.kill(child, "is gone")
    processes.stop_all()
    processes.forget(child)
    assert signalled == []


def test_hangup_stops_unless_it_was_ignored_at_start():
    said = {
        disposition: subprocess.run(
            [sys.executable, "-c", UNDER_NOHUP.format(disposition=disposition)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ).stdout.split()
        for disposition in (signal.SIG_IGN.name, signal.SIG_DFL.name)
    }
    assert said == {"SIG_IGN": ["False", "True"], "SIG_DFL": ["True", "True"]}


BEFORE_THE_RUN = """
import os, signal
from buckeye.base.process import StopFlag, interrupt_on_signals
interrupt_on_signals()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:  # as Python does in a callback
    print("interrupted")
print(StopFlag().install().requested)
"""


def test_an_interrupt_before_the_run_is_not_lost():
    argv = [sys.executable, "-c", BEFORE_THE_RUN]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["interrupted", "True"]
