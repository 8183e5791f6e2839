"""Run the orchestrator's coroutines concurrently until one ends or a stop is requested."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Coroutine
from typing import Any

from buckeye.base import heartbeat

log = logging.getLogger(__name__)

_PULSE_SECONDS = 1.0
_GARBAGE_SECONDS = 60.0
_YOUNG_OBJECTS, _NEVER = 2000, 1 << 30


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


async def collect_garbage() -> None:
    """Collect all cyclic garbage once a minute, until cancelled; meanwhile, only that of young objects.

    A full collection stops all threads, for about a second with ten thousand rollouts, and Python would run
    one whenever the number of old objects has grown by a quarter. Objects of the program are left out.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, _NEVER)
    while True:
        await asyncio.sleep(_GARBAGE_SECONDS)
        gc.collect()


async def _pulse() -> None:
    """Send heartbeats while the event loop runs. A blocked event loop sends none."""
    while True:
        heartbeat.pulse()
        await asyncio.sleep(_PULSE_SECONDS)
