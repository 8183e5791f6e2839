"""Find processes that a test started and left running."""

import os
import time
from pathlib import Path

from tests.waiting import HANG


def processes_with(marker):
    """Return the ids of the processes with `marker` in their environment or on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            known = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if marker.encode() in known and not zombie:
            found.append(int(entry.name))
    return found


def assert_none_left(marker):
    """Assert that all processes with the marker exit before a deadline."""
    deadline = time.monotonic() + HANG
    while left := processes_with(marker):
        assert time.monotonic() < deadline, f"processes left: {left}"
        time.sleep(0.02)
