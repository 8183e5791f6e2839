"""Bounded queue with the messages of one HTTP response."""

from __future__ import annotations

import asyncio
from collections import deque

MAX_MESSAGES, MAX_BYTES = 1000, 8 * 2**20
"""Limits of a channel. Above a limit, the channel drops its oldest messages and counts them.

The channel never drops the newest message, so it never drops a response.
"""


class Channel:
    """Bounded queue of messages with one reader. `close` ends the queue."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self.closed = False
        """True if the channel accepts no more messages. Unread messages may remain."""
        self.broken = False
        """True if the gateway closed the channel before the environment responded."""
        self.dropped = 0

    def put(self, message: bytes) -> None:
        """Add a message. Drop the oldest messages above a limit."""
        if self.closed:
            return
        self._waiting.append(message)
        self._bytes += len(message)
        while len(self._waiting) > MAX_MESSAGES or (self._bytes > MAX_BYTES and len(self._waiting) > 1):
            self._bytes -= len(self._waiting.popleft())
            self.dropped += 1
        self._changed.set()

    def close(self, last: bytes | None = None, *, broken: bool = False) -> None:
        """Add the message `last`, if given, and close the channel."""
        if last is not None:
            self.put(last)
        self.closed, self.broken = True, broken
        self._changed.set()

    async def get(self, seconds: float) -> bytes | None:
        """Return the next message, or None after `seconds` or if the channel is closed and empty."""
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
        """True if the channel is closed and has no unread messages."""
        return self.closed and not self._waiting
