"""Processes that exit with their launcher."""

import os
import signal
import subprocess
import sys

import pytest

from buckeye.launch.resume import wait_for_leftovers

from .made_runs import made_run, recorded

SEES_PROCESS_1 = """
import os
from buckeye.base.process import die_with_parent
os.getppid = lambda: 1
die_with_parent()
"""


@pytest.mark.parametrize(("launcher", "code"), [("1", 0), (str(os.getpid()), 1)], ids=["it is", "it is not"])
def test_process_1_counts_as_parent_only_if_it_is_the_launcher(launcher, code):
    """In a container the launcher may be process 1; otherwise process 1 adopts orphans."""
    environment = os.environ | {"BUCKEYE_PARENT_PID": launcher}
    done = subprocess.run([sys.executable, "-c", SEES_PROCESS_1], env=environment, check=False)
    assert done.returncode == code


def test_suspended_leftover_process_is_killed_on_resume(tmp_path):
    """It was suspended before it could register to exit with its launcher, so it would wait forever."""
    words = [sys.executable, "-c", "import time; time.sleep(100)"]
    left = subprocess.Popen(words)
    try:
        run = made_run(tmp_path / "run", state="running", processes=(recorded(left, "trainer 0"),))
        left.send_signal(signal.SIGSTOP)
        wait_for_leftovers(run)
        assert left.wait() == -signal.SIGKILL
    finally:
        left.kill()
