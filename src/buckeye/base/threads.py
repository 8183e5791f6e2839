"""Run blocking functions in threads from asyncio code, with defined behavior on cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


async def finish_in_thread(work: Callable[..., T], *args: object) -> T:
    """Run `work(*args)` in a thread and return its result. Wait for its end even if the caller is cancelled.

    The cancellation is raised after the work has ended. `asyncio.to_thread` returns immediately on
    cancellation, while its thread continues or does not start at all. Use this function for work that creates
    or deletes something that the caller owns.
    """
    result, cancellation = await _finish(work, *args)
    if cancellation is not None:
        raise cancellation
    return result.result()


async def acquire_in_thread(acquire: Callable[..., T], *args: object, release: Callable[[T], object]) -> T:
    """Run `acquire(*args)` in a thread, and return its result.

    If the caller is cancelled during the call, call `release(result)` in a thread, and then raise the
    cancellation.
    """
    result, cancellation = await _finish(acquire, *args)
    if cancellation is None:
        return result.result()
    if result.exception() is None:
        released, _ = await _finish(release, result.result())
        released.result()
    raise cancellation


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work()` in a thread that does not delay the end of the process, and return its result.

    If the caller is cancelled, the thread continues, and its result is dropped. An error of `work` is raised.
    A coroutine cannot raise StopIteration, so RuntimeError with the traceback of `work` is raised instead.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Callable[[], T]] = loop.create_future()

    def finish(result: Callable[[], T]) -> None:
        if not future.done():
            future.set_result(result)

    def run() -> None:
        result = _outcome_of(work)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(finish, result)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return (await future)()


def _outcome_of(work: Callable[[], T]) -> Callable[[], T]:
    """Return a function that returns the result of `work()`, or raises its error."""
    try:
        value = work()
    except BaseException as raised:
        error = raised
        if isinstance(raised, StopIteration):
            error = RuntimeError("StopIteration").with_traceback(raised.__traceback__)
        return lambda: _raise(error)
    return lambda: value


def _raise(error: BaseException) -> NoReturn:
    raise error


async def _finish(
    work: Callable[..., T], *args: object
) -> tuple[asyncio.Future[T], asyncio.CancelledError | None]:
    """Run `work(*args)` in a thread until it ends. Return its future and the last cancellation, or None."""
    # not a task, because the end of an event loop cancels all tasks
    future = asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, work, *args)
    cancellation = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None and not future.cancelled():
        future.exception()  # prevents asyncio's warning about an error that is not retrieved
    return future, cancellation
