"""Wait for an event, however slow the machine is."""

import time

HANG = 600.0
"""Timeout in seconds that only a defect exceeds, never a loaded machine."""


def wait_for(condition, what="it", more=lambda: ""):
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {HANG:g} s\n{more()}"
        time.sleep(0.02)
