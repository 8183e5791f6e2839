"""Request a session from a fork server. The session has the interface of an asyncio process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Mapping
from typing import Any

_FORK_SECONDS = 20.0
_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ForkError(Exception):
    """The fork server could not fork a session. The message is the reason."""


class ForkedProcess:
    """Process of a forked session: id, exit code and streams. `fork_session` creates it."""

    def __init__(self, pid: int, streams: list[_Stream]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: asyncio.StreamWriter | None = streams[0][1]
        self.stdout: asyncio.StreamReader | None = streams[1][0]
        self.stderr: asyncio.StreamReader | None = streams[2][0]
        self._writers = [writer for _, writer in streams]
        self._waiter = asyncio.create_task(self._wait_for_exit(streams[3][0]))

    async def _wait_for_exit(self, status: asyncio.StreamReader) -> None:
        line = await status.readline()
        # without an exit code, the fork server was killed, and the kernel killed the session too
        self.returncode = int(line) if line else -signal.SIGKILL

    def close(self) -> None:
        """Close the streams, even if another process still has the other ends open."""
        self._waiter.cancel()
        for writer in self._writers:
            writer.close()


async def fork_session(control: socket.socket, spec: Mapping[str, Any]) -> ForkedProcess:
    """Request a session from the fork server at the other end of `control`. Raises ForkError.

    `spec` is the specification that `server.py` describes.
    """
    pairs = [socket.socketpair() for _ in range(4)]
    streams: list[_Stream] = []
    try:
        socket.send_fds(control, [b"+"], [remote_end.fileno() for _, remote_end in pairs])
        for _, remote_end in pairs:
            remote_end.close()
        async with asyncio.timeout(_FORK_SECONDS):
            for local_end, _ in pairs:
                streams.append(await asyncio.open_connection(sock=local_end))
            status, request = streams[3]
            request.write(json.dumps(spec).encode() + b"\n")
            return ForkedProcess(int(await status.readline()), streams)
    except BaseException as error:
        for _, writer in streams:
            writer.close()
        for end in (end for pair in pairs for end in pair):
            end.close()
        if isinstance(error, OSError | ValueError):  # TimeoutError is an OSError
            raise ForkError(f"the fork server does not reply: {error or type(error).__name__}") from None
        raise
