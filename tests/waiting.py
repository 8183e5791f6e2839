"""Waiting for what is going to happen, however slow the machine is."""

import time

HANG = 600.0
"""Seconds after which it will not happen any more: so that a defect ends a test, never a loaded machine."""


def wait_for(condition, what="it", more=lambda: ""):
    """Until `condition()` is true."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {HANG:g} s\n{more()}"
        time.sleep(0.02)
