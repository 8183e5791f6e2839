"""A process of a run as its host sees it: a session of its own, and a pipe for its beats."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from buckeye.base.heartbeat import BEAT_VARIABLE
from buckeye.base.process import handed_over


def start_session(
    argv: Sequence[str], *, env: Mapping[str, str], output: IO[bytes] | int, cwd: Path | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a program of Buckeye's, which prints to `output`, and return it with the end of the pipe that its
    beats come from. Call it from the main thread only: on Linux what is started ends with the thread."""
    reading, writing = os.pipe()
    plain, secrets = handed_over(env)
    passed = (writing,) if secrets is None else (writing, secrets)
    try:
        process = subprocess.Popen(  # noqa: S603  a list of words, without a shell
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**plain, BEAT_VARIABLE: str(writing)},
            cwd=cwd,
            pass_fds=passed,
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        for descriptor in passed:
            os.close(descriptor)
    return process, reading


def signal_session(leader: int, number: int) -> None:
    """Send a signal to all processes of a session, whose first one's number is `leader`."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.Signals(number))


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended. What is left of its session is killed as soon as it is seen: later the
    number may be another process's."""
    if process.returncode is None and process.poll() is not None:
        signal_session(process.pid, signal.SIGKILL)
    return process.returncode is not None
