"""A session's process that was forked by another one: what asyncio knows of its own children, by pipes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from asyncio.streams import FlowControlMixin
from collections.abc import Mapping
from typing import Any

_SEND_SECONDS = 5.0
_FORK_SECONDS = 20.0


class ForkFailed(Exception):
    """No process was forked; the message says why."""


class ForkedProcess:
    """Has the pipes, the id and the exit code of an asyncio process; `fork_session` makes it."""

    def __init__(self, pid: int, status: asyncio.StreamReader) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self.transports: list[asyncio.BaseTransport] = []
        self._watch = asyncio.create_task(self._wait(status))

    async def _wait(self, status: asyncio.StreamReader) -> None:
        line = await status.readline()
        # without a line its parent was killed, and it with it
        self.returncode = int(line) if line else -signal.SIGKILL

    def close(self) -> None:
        """Let go of the pipes, whoever holds their other ends."""
        self._watch.cancel()
        for transport in self.transports:
            transport.close()


def sealed(spec: Mapping[str, Any]) -> int:
    """A file in memory with a session's specification; returns its descriptor."""
    file = os.memfd_create("session", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(file), "wb") as writing:
        writing.write(json.dumps(spec).encode())
    return file


async def fork_session(control: socket.socket, spec: Mapping[str, Any]) -> ForkedProcess:
    """Ask the process at the other end of `control` for a session. Raises ForkFailed."""
    ours, theirs = _pipes(spec)
    try:
        control.settimeout(_SEND_SECONDS)
        socket.send_fds(control, [b"+"], theirs)
    except OSError as error:
        for end in ours:
            os.close(end)
        raise ForkFailed(f"it reads no more ({error})") from None
    finally:
        for end in theirs:
            os.close(end)
    transports: list[asyncio.BaseTransport] = []
    try:
        said = await _reader(ours.pop(0), transports)
        async with asyncio.timeout(_FORK_SECONDS):
            line = (await said.readline()).decode(errors="replace").strip()
        if not line.isdigit():
            raise ForkFailed(line or "it has ended")
        process = ForkedProcess(int(line), said)
        process.transports = transports
        process.stdin = await _writer(ours.pop(0), transports)
        process.stdout = await _reader(ours.pop(0), transports)
        process.stderr = await _reader(ours.pop(0), transports)
    except BaseException as error:
        for transport in transports:
            transport.close()
        for end in ours:
            os.close(end)
        if isinstance(error, TimeoutError):
            raise ForkFailed(f"it gave no answer within {_FORK_SECONDS:g} s") from None
        raise
    return process


def _pipes(spec: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Our ends (status, input, output, error output), and the session's: the last three, status, its
    specification."""
    pairs = [os.pipe() for _ in range(4)]
    ours = [pairs[3][0], pairs[0][1], pairs[1][0], pairs[2][0]]
    theirs = [pairs[0][0], *(writing for _, writing in pairs[1:]), sealed(spec)]
    return ours, theirs


async def _reader(end: int, transports: list[asyncio.BaseTransport]) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader, loop=loop), os.fdopen(end, "rb", buffering=0)
    )
    transports.append(transport)
    return reader


async def _writer(end: int, transports: list[asyncio.BaseTransport]) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: FlowControlMixin(loop=loop), os.fdopen(end, "wb", buffering=0)
    )
    transports.append(transport)
    return asyncio.StreamWriter(transport, protocol, None, loop)
