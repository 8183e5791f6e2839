"""Send heartbeats of this process to the launcher: its activity, and the process that it waits for.

The launcher gives each process the write end of a pipe. A thread writes a line of JSON about once a second.
If the pipe is full, the line is dropped, so no process waits for the launcher. Without the pipe, this module
does nothing.
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
"""Environment variable with the file descriptor of the pipe."""

_INTERVAL_SECONDS = 1.0
_MAX_MESSAGE = 3000  # bytes; a pipe holds many lines of this length


@dataclass(frozen=True, slots=True)
class _Activity:
    """Current activity of a process.

    `doing` is the name of the activity. `on` is the kind of process that this process waits for, or None.
    `since` is the start of the activity in seconds of the monotonic clock. `progress` counts the activities.
    """

    progress: int
    doing: str
    on: str | None
    since: float


_activity = _Activity(0, "starts", None, time.monotonic())
_pulse: float | None = None
_is_ready = False
_pipe: int | None = None
_write_lock = threading.Lock()


def report(doing: str, *, on: str | None = None) -> None:
    """Report the current activity of this process.

    With `on`, this process is waiting. `doing` names the result that it waits for, such as "weights 3". `on`
    names the source of the result: "trainer", "orchestrator", "inference", "environment", "disk" or "store".
    A repeated report of the same wait is not progress. Without `on`, every call is progress. A call takes
    about a microsecond.
    """
    global _activity
    last = _activity
    is_same = last.doing == doing and last.on == on
    if is_same and on is not None:
        return
    _activity = _Activity(last.progress + 1, doing, on, last.since if is_same else time.monotonic())


def pulse() -> None:
    """Report that the event loop of this process is running. After the first call, call it regularly."""
    global _pulse
    _pulse = time.monotonic()


def ready() -> None:
    """Report that this process has started up and is ready."""
    global _is_ready
    _is_ready = True
    _send()


def failed(message: str, *, error: str, final: bool, code: str) -> None:
    """Report the error that ends this process.

    `error` is the class of the error, and `code` is its stable code. `final` means that a restart cannot fix
    the error.
    """
    message = message.encode(errors="replace")[:_MAX_MESSAGE].decode(errors="ignore")
    _write({"failed": {"message": message, "error": error, "final": final, "code": code}})


def leave(code: int) -> None:
    """End this process after its exit handlers, without the shutdown of the interpreter.

    The shutdown can take seconds without a heartbeat, and the run would wait for it. If no launcher started
    this process, the function returns.
    """
    if _pipe is None:
        return
    report("ends")
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def start() -> None:
    """Start to send heartbeats. Call this function once, early, and after `die_with_parent`.

    After the call, SIGUSR1 makes this process write the Python stacks of all threads to its log.
    """
    global _pipe
    number = os.environ.pop(HEARTBEAT_VARIABLE, None)  # child processes must not inherit it
    if number is None:
        return
    _pipe = int(number)
    os.set_inheritable(_pipe, False)
    os.set_blocking(_pipe, False)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    threading.Thread(target=_send_repeatedly, name="heartbeat", daemon=True).start()


def _send_repeatedly() -> None:
    while _pipe is not None:
        _send()
        time.sleep(_INTERVAL_SECONDS)


def _send() -> None:
    _write({"pid": os.getpid(), **asdict(_activity), "pulse": _pulse, "ready": _is_ready})


def _write(values: dict[str, Any]) -> None:
    if _pipe is None:
        return
    line = json.dumps(values).encode() + b"\n"
    # OSError: the pipe is full, or the launcher has ended and this process ends, too
    with _write_lock, contextlib.suppress(OSError):
        os.write(_pipe, line)
