"""Limits on the concurrency and the start rate of an environment's rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

log = logging.getLogger(__name__)


class Admission:
    """Limiter for the rollouts of one environment. None: no limit.

    At most `max_concurrent` rollouts run at a time, and `rate_limit` rollouts start per second, evenly
    spaced. `clock` returns seconds, and `sleep` waits for seconds.
    """

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
        """Wait for a free slot and for the next start time, and hold the slot during the block."""
        async with self._slots or contextlib.nullcontext():
            await self.wait_for_start()
            yield

    async def wait_for_start(self) -> None:
        """Wait for the next start time."""
        if not self._interval:
            return
        now = self._clock()
        start = max(now, self._next)
        self._next = start + self._interval
        if start > now:
            await self._sleep(start - now)
