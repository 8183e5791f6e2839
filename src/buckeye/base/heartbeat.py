"""What a process of a run says about itself to the launcher: that it lives, what it does, whom it waits for.

The launcher hands every process the writing end of a pipe. A thread writes a line of JSON about once a
second; a full pipe drops it, so nobody ever waits for the launcher. Without the pipe this does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

HEARTBEAT_VARIABLE = "BUCKEYE_HEARTBEAT_FD"
"""The environment variable that holds the pipe's file descriptor."""

_EVERY_SECONDS = 1.0
_LONGEST_MESSAGE = 3000  # bytes; a pipe holds many lines of this length


@dataclass(frozen=True, slots=True)
class _Now:
    """`progress` counts what was begun; `doing` is its name, `on` the kind of process that it waits for, and
    `since` when it was begun (monotonic clock, seconds)."""

    progress: int
    doing: str
    on: str | None
    since: float


_now = _Now(0, "starts", None, time.monotonic())
_pulse: float | None = None
_is_ready = False
_pipe: int | None = None
_writing = threading.Lock()


def report(doing: str, *, on: str | None = None) -> None:
    """Say what this process does now. With `on` it waits for `doing` of that kind of process ("trainer",
    "orchestrator", "inference", "environment", "disk", "store"), and saying so again is no progress; without,
    every call is. Costs about a microsecond."""
    global _now
    now = _now
    same = now.doing == doing and now.on == on
    if same and on is not None:
        return
    _now = _Now(now.progress + 1, doing, on, now.since if same else time.monotonic())


def pulse() -> None:
    """Say that the event loop of this process turns. Once said, it must be said again and again."""
    global _pulse
    _pulse = time.monotonic()


def ready() -> None:
    """Say that this process has started up and does its work from now on."""
    global _is_ready
    _is_ready = True
    _send()


def failed(message: str, *, error: str, final: bool) -> None:
    """Say why this process is about to end. `error` is the class of the error; `final` that no other try can
    mend it."""
    cut = message.encode(errors="replace")[:_LONGEST_MESSAGE].decode(errors="ignore")
    _write({"failed": {"message": cut, "error": error, "final": final}})


def leave(code: int) -> None:
    """End this process now, if a launcher has started it: taking the interpreter apart may last for seconds,
    without a sign of life, and the run would wait for it. What is registered to be done at the end is done.
    Returns where there is no launcher."""
    if _pipe is None:
        return
    report("ends")
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def start() -> None:
    """Begin to tell the launcher; call once, early, after `die_with_parent`. From then on SIGUSR1 makes this
    process write the Python stacks of all its threads to its log."""
    global _pipe
    number = os.environ.pop(HEARTBEAT_VARIABLE, None)  # not of the processes that this one starts
    if number is None:
        return
    _pipe = int(number)
    os.set_inheritable(_pipe, False)
    os.set_blocking(_pipe, False)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    threading.Thread(target=_keep_telling, name="heartbeat", daemon=True).start()


def _keep_telling() -> None:
    while _pipe is not None:
        _send()
        time.sleep(_EVERY_SECONDS)


def _send() -> None:
    _write({"pid": os.getpid(), **asdict(_now), "pulse": _pulse, "ready": _is_ready})


def _write(values: dict[str, Any]) -> None:
    if _pipe is None:
        return
    line = json.dumps(values).encode() + b"\n"
    with _writing, contextlib.suppress(OSError):  # full, or the launcher is gone: then this process ends too
        os.write(_pipe, line)
