"""Runs inside each of vLLM's processes (as one of its general plugins): none outlives its parent.

Without it the engine's processes keep their memory, and on a GPU its memory too, when their server is killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM once in every process."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if os.getppid() == 1 or (parent is not None and not parent.is_alive()):
        os._exit(1)  # it died while this process was starting
