"""Blocking work in a thread, under cancellation."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def finish_in_thread(work: Callable[..., T], *args: object) -> T:
    """Run `work(*args)` in a thread and wait for its end, even if the caller is cancelled.

    `asyncio.to_thread` returns at once on cancellation: its thread continues, or never starts. Use this
    function for work that creates or removes something that the caller owns. A cancellation is raised after
    the work has ended.
    """
    result, cancellation = await _finish(work, *args)
    if cancellation is not None:
        raise cancellation
    return result.result()


async def acquire_in_thread(acquire: Callable[..., T], *args: object, release: Callable[[T], object]) -> T:
    """Return `acquire(*args)`, run in a thread.

    If the caller is cancelled meanwhile, pass the result to `release`, also in a thread, before raising the
    cancellation.
    """
    result, cancellation = await _finish(acquire, *args)
    if cancellation is None:
        return result.result()
    if result.exception() is None:
        released, _ = await _finish(release, result.result())
        released.result()
    raise cancellation


async def _finish(
    work: Callable[..., T], *args: object
) -> tuple[asyncio.Future[T], asyncio.CancelledError | None]:
    """Return the finished future of `work(*args)`, and the last cancellation that arrived meanwhile."""
    # a future of the executor, not a task: the end of an event loop cancels all tasks
    future = asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, work, *args)
    cancellation = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None and not future.cancelled():
        future.exception()  # mark it as retrieved: the cancellation replaces it
    return future, cancellation
