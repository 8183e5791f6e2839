"""Limits on how many rollouts of an environment run at a time, and start in a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

log = logging.getLogger(__name__)


class Admission:
    """Lets rollouts of one environment start: at most `max_concurrent` at a time and `rate_limit` in a
    second, evenly spread; None is no limit. `clock` gives seconds, `sleep` waits for some."""

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        rate_limit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._slots = asyncio.Semaphore(max_concurrent) if max_concurrent else None
        self._interval = 1.0 / rate_limit if rate_limit else 0.0
        self._clock = clock
        self._sleep = sleep
        self._next = 0.0

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the places, and be let in at a time of one's own."""
        async with self._slots or contextlib.nullcontext():
            await self.turn()
            yield

    async def turn(self) -> None:
        """Wait until one more rollout may start."""
        if not self._interval:
            return
        now = self._clock()
        start = max(now, self._next)
        self._next = start + self._interval
        if start > now:
            await self._sleep(start - now)
