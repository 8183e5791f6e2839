"""Fault points: named places in the code where tests make a process fail. They do nothing in real runs.

`BUCKEYE_FAULTS="checkpoint.before_commit=kill@2,trainer.oom=oom"` names points and kinds of failure. `@2`
means the second time that a process reaches the point (default: the first time). Each entry makes only one
process fail, once. That process leaves a file in the directory `BUCKEYE_FAULTS_DONE`, so other processes and
restarts ignore the entry.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

FAULTS = "BUCKEYE_FAULTS"
FAULTS_DONE = "BUCKEYE_FAULTS_DONE"

_visits: Counter[str] = Counter()


def fault_point(name: str) -> None:
    """Make this process fail if `BUCKEYE_FAULTS` requests a failure at the point `name`.

    Raise `OSError` (no space), `RuntimeError`, or torch's `OutOfMemoryError`.
    """
    text = os.environ.get(FAULTS)
    if not text:
        return
    _visits[name] += 1
    for number, entry in enumerate(text.replace(" ", "").split(","), start=1):
        fault, _, visit = entry.partition("@")
        point, _, kind = fault.partition("=")
        if point == name and int(visit or 1) == _visits[name] and _is_first(f"{number}-{entry}"):
            _KINDS[kind]()


def _is_first(mark: str) -> bool:
    """Create the file `mark`. Return True if it did not exist."""
    try:
        Path(os.environ[FAULTS_DONE], mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("out of memory, injected by BUCKEYE_FAULTS")


def _error() -> None:
    raise RuntimeError("error injected by BUCKEYE_FAULTS")


_KINDS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "nospace": _no_space,
    "oom": _out_of_memory,
    "error": _error,
    "exit": lambda: os._exit(1),
}
