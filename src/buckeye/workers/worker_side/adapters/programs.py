"""Runner for an agent's program, in a separate process group that ends with the rollout."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TAIL_BYTES = 256 * 1024
_END_TIMEOUT = 5.0
_OUTPUT_TIMEOUT = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProgramResult:
    """Exit status of a program (None after a timeout), and the last part of its stdout and its stderr."""

    status: int | None
    stdout: str
    stderr: str

    def last_lines(self, count: int = 8) -> str:
        """Return the last lines of stderr, or of stdout if stderr is empty."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()[-count:]
        return "\n".join(lines) or "(no output)"


async def run_program(
    command: Sequence[str], *, environ: Mapping[str, str], cwd: str | None, timeout: float
) -> ProgramResult:
    """Run a program for at most `timeout` seconds. Raises OSError if it cannot be started.

    The process group of the program is killed when the program ends, at the timeout, and when the caller is
    cancelled.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=dict(environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=start_process_group,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    tails = bytearray(), bytearray()
    streams = process.stdout, process.stderr
    outputs = [
        asyncio.ensure_future(_tail(stream, tail)) for stream, tail in zip(streams, tails, strict=True)
    ]
    status: int | None = None
    try:
        status = await _status_within(process, timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _, unfinished = await asyncio.wait(outputs, timeout=_OUTPUT_TIMEOUT)
        for output in unfinished:
            output.cancel()  # a leaked child in another process group holds the pipe open
        await _status_within(process, _END_TIMEOUT)
        process._transport.close()  # type: ignore[attr-defined]
    stdout, stderr = (tail.decode("utf-8", "replace") for tail in tails)
    return ProgramResult(status=status, stdout=stdout, stderr=stderr)


async def _status_within(process: asyncio.subprocess.Process, seconds: float) -> int | None:
    """Return the exit status, or None if the process has not ended after `seconds`.

    `Process.wait` would also wait for the outputs, which a leaked child may hold open.
    """
    deadline, pause = time.monotonic() + seconds, 0.002
    while process.returncode is None and time.monotonic() < deadline:
        await asyncio.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return process.returncode


async def _tail(stream: asyncio.StreamReader, tails: bytearray) -> None:
    """Read a whole output, so that the program never blocks on writing, and keep its end."""
    while chunk := await stream.read(65536):
        tails += chunk
        del tails[:-_TAIL_BYTES]


_libc = ctypes.CDLL(None)


def start_process_group() -> None:
    """Put the child into its own process group. The kernel kills the child when this process ends.

    Buckeye has a function for this, but this interpreter may lack Buckeye.
    """
    os.setpgrp()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
