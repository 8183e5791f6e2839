"""A process whose terminal or reader disappears."""

import os
import pty
import subprocess
import sys

import pytest

PRINTS_ON = """
import logging, sys
from pathlib import Path
from buckeye.monitor.log import setup_logging
setup_logging("info", "rl", Path(sys.argv[1]))
log = logging.getLogger("buckeye.test")
print("first", flush=True)
sys.stdin.readline()
for i in range(3):
    print("progress", flush=True)
    log.info("line %d", i)
sys.stderr.write("the end")
print("not flushed")
"""


def test_work_goes_on_and_is_logged_when_nobody_reads_what_is_printed(tmp_path, wording):
    reading, writing = os.pipe()
    reader = os.fdopen(reading, "rb")
    words = [sys.executable, "-c", PRINTS_ON, str(tmp_path / "run.log")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=writing, stderr=writing)
    os.close(writing)
    assert reader.readline() == b"first\n"
    reader.close()
    process.communicate(b"go on\n")
    assert process.returncode == 0
    lines = [line.partition("] ")[2].strip() for line in (tmp_path / "run.log").read_text().splitlines()]
    assert [line for line in lines if line.startswith("INFO")] == [f"INFO line {i}" for i in range(3)]
    assert lines[0] == wording


@pytest.mark.parametrize(
    ("variables", "is_colored"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
    ids=["", "NO_COLOR", "dumb"],
)
def test_log_is_colored_unless_the_terminal_or_user_refuses(variables, is_colored):
    code = "from buckeye.monitor.log import logging, setup_logging; setup_logging('info', 'rl', None); "
    code += "logging.getLogger('buckeye.test').warning('seen')"
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    reading, writing = pty.openpty()
    with open(reading, "rb", closefd=True) as reader:
        subprocess.run(
            [sys.executable, "-c", code],
            stdout=writing,
            env=environment | {"TERM": "xterm"} | variables,
            check=True,
        )
        os.close(writing)
        line = reader.readline()
    assert b"seen" in line
    assert (b"\x1b[33m" in line) == is_colored
