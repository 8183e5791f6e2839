"""Run the orchestrator's coroutines concurrently until one ends or a stop is requested."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

from buckeye.base import heartbeat

log = logging.getLogger(__name__)

_PULSE_SECONDS = 1.0


async def run_until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end, or until SIGTERM or SIGINT. Return False if a signal stopped it."""
    running = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        running.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    pulse = asyncio.create_task(_pulse())
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
        log.info("Orchestrator stopped.")
        return False
    finally:
        pulse.cancel()
    return True


async def run_until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines concurrently until one returns or raises, then cancel the others."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pulse() -> None:
    """Send heartbeats while the event loop runs. A blocked event loop sends none."""
    while True:
        heartbeat.pulse()
        await asyncio.sleep(_PULSE_SECONDS)
