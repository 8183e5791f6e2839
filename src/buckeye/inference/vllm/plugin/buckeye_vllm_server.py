"""vLLM's server, with processes that end with their parent: `python -m buckeye_vllm_server ARGUMENTS`.

A spawned Python process imports its parent's main module first. So the code here runs at the start of every
process of the server. Otherwise processes could outlive a killed server, and keep their main and GPU memory.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_SERVER = "vllm.entrypoints.openai.api_server"
_PARENT = "BUCKEYE_VLLM_PARENT"
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """End this process when its parent dies.

    A copy of `buckeye.base.process`: Buckeye is not installed where vLLM is.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[_PARENT]):
        os._exit(1)  # the parent died before the request took effect
    os.environ[_PARENT] = str(os.getpid())  # for the processes that this one starts


_die_with_parent()

if __name__ == "__main__":
    runpy.run_module(_SERVER, run_name="__main__")
