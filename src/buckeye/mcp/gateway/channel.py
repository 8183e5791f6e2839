"""Queue of messages for one HTTP response."""

from __future__ import annotations

import asyncio
from collections import deque

MAX_MESSAGES, MAX_BYTES = 1000, 8 * 2**20
"""Limits of waiting messages. Above them, the oldest messages are dropped and counted.

Responses are never dropped.
"""


class Channel:
    """Bounded queue with one reader. `close` ends it."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self.closed = False
        """True if no more messages are accepted; some may still wait."""
        self.broken = False
        """True if the gateway closed it before the environment responded."""
        self.dropped = 0

    def put(self, message: bytes) -> None:
        """Add a message. The oldest messages are dropped to make room."""
        if self.closed:
            return
        self._waiting.append(message)
        self._bytes += len(message)
        while len(self._waiting) > MAX_MESSAGES or (self._bytes > MAX_BYTES and len(self._waiting) > 1):
            self._bytes -= len(self._waiting.popleft())
            self.dropped += 1
        self._changed.set()

    def close(self, last: bytes | None = None, *, broken: bool = False) -> None:
        """Add a last message, if given, and close the channel."""
        if last is not None:
            self.put(last)
        self.closed, self.broken = True, broken
        self._changed.set()

    async def get(self, seconds: float) -> bytes | None:
        """Return the next message; None after `seconds`, or if the channel is closed and empty."""
        if not self._waiting and not self.closed:
            self._changed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                return None
        if not self._waiting:
            return None
        message = self._waiting.popleft()
        self._bytes -= len(message)
        return message

    @property
    def finished(self) -> bool:
        """True if the channel is closed and read to its end."""
        return self.closed and not self._waiting
