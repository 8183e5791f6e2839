"""Processes that end with their launcher."""

import os
import subprocess
import sys

import pytest

SEES_PROCESS_1 = """
import os
from buckeye.process import die_with_parent
os.getppid = lambda: 1
die_with_parent()
"""


@pytest.mark.parametrize(("launcher", "code"), [("1", 0), (str(os.getpid()), 1)])
def test_process_1_is_a_parent_only_if_it_is_the_launcher(launcher, code):
    """In a container it may be; otherwise it is who adopts orphans."""
    environment = os.environ | {"BUCKEYE_PARENT_PID": launcher}
    done = subprocess.run([sys.executable, "-c", SEES_PROCESS_1], env=environment, timeout=60, check=False)
    assert done.returncode == code
