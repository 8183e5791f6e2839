"""Running the program of an agent: a group of processes of its own that ends with the rollout."""

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
class Finished:
    """How a program ended: its exit status, the end of both outputs; the status is None if time ran out."""

    status: int | None
    stdout: str
    stderr: str

    def last_lines(self, count: int = 8) -> str:
        """What it said last, for a message."""
        said = (self.stderr.strip() or self.stdout.strip()).splitlines()[-count:]
        return "\n".join(said) or "(it said nothing)"


async def run_program(
    command: Sequence[str], *, environ: Mapping[str, str], cwd: str | None, timeout: float
) -> Finished:
    """Run a program for at most `timeout` seconds; it and its children are killed when it ends, when time
    runs out, and when the caller is cancelled. Raises OSError if it cannot be started."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=dict(environ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=_own_group,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    kept = bytearray(), bytearray()
    streams = process.stdout, process.stderr
    outputs = [asyncio.ensure_future(_tail(stream, end)) for stream, end in zip(streams, kept, strict=True)]
    status: int | None = None
    try:
        status = await _status_within(process, timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _, late = await asyncio.wait(outputs, timeout=_OUTPUT_TIMEOUT)
        for output in late:
            output.cancel()  # a process that it left behind, in another group, holds it open
        await _status_within(process, _END_TIMEOUT)
        process._transport.close()  # type: ignore[attr-defined]
    stdout, stderr = (end.decode("utf-8", "replace") for end in kept)
    return Finished(status=status, stdout=stdout, stderr=stderr)


async def _status_within(process: asyncio.subprocess.Process, seconds: float) -> int | None:
    """The exit status, None if it has not ended by then. `Process.wait` would also wait for the outputs,
    which a process that was left behind may hold open."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while process.returncode is None and time.monotonic() < deadline:
        await asyncio.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return process.returncode


async def _tail(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Keep the end of an output, which is read to its end so that the program never waits for us."""
    while chunk := await stream.read(65536):
        kept += chunk
        del kept[:-_TAIL_BYTES]


_libc = ctypes.CDLL(None) if os.uname().sysname == "Linux" else None


def _own_group() -> None:
    """Called in the child: a group of its own, which Linux ends when this process does. The environment's own
    interpreter has no Buckeye that could."""
    os.setpgrp()
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
