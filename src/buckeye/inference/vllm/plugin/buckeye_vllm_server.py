"""Start of vLLM's server with `python -m buckeye_vllm_server ARGUMENTS`. Each process ends with its parent.

A spawned Python process first imports the main module of its parent. So this module runs at the start of
every process of the server. Without it, processes could continue after a server was killed, and keep GPU
memory.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal

_SERVER = "vllm.entrypoints.openai.api_server"
_PARENT = "BUCKEYE_VLLM_PARENT"
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """End this process when its parent dies.

    This is a copy of a function in `buckeye.base.process`, because vLLM's environment may not have Buckeye.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[_PARENT]):
        os._exit(1)  # the parent ended before prctl
    os.environ[_PARENT] = str(os.getpid())  # child processes of this process read it


_die_with_parent()

if __name__ == "__main__":
    runpy.run_module(_SERVER, run_name="__main__")
