"""One thread with its own event loop, in which this process watches all workers.

Synchronous code and code of any event loop can therefore use workers, and workers are watched while the loop
of the rollouts is busy. The first worker starts the thread.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from buckeye.workers.pool import WorkerPool

T = TypeVar("T")
_CLOSE_TIMEOUT = 15.0


class WorkerLoop:
    """Thread with an event loop, and the objects to close at exit.

    At exit it also waits for objects that are being closed: a transport that outlives the event loop would
    fail with "Event loop is closed".
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open: set[WorkerPool] = set()
        self._closings: set[concurrent.futures.Future[None]] = set()
        self._thread = threading.Thread(target=self._run, name="environment-workers", daemon=True)
        self._thread.start()
        atexit.register(self._close_all)
        self.pid = os.getpid()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in this loop. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this loop, awaited from any event loop."""
        return await asyncio.wrap_future(self.submit(work))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this loop and block until it ends. The coroutine needs its own timeout."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def register(self, closing: WorkerPool) -> Callable[[], None]:
        """Close an object when this process ends.

        The returned function closes it earlier, without waiting. It may be called at any time from any
        thread.
        """
        self._open.add(closing)

        def close() -> None:
            if closing in self._open and os.getpid() == self.pid and not self._loop.is_closed():
                self._open.discard(closing)
                future = self.submit(closing.close())
                self._closings.add(future)
                future.add_done_callback(self._closings.discard)

        return close

    def unregister(self, closing: WorkerPool) -> None:
        """Remove an object that has been closed."""
        self._open.discard(closing)

    def _close_all(self) -> None:
        if os.getpid() != self.pid:
            return
        closings = [*self._closings.copy(), *(self.submit(closing.close()) for closing in list(self._open))]
        concurrent.futures.wait(closings, timeout=_CLOSE_TIMEOUT)
        concurrent.futures.wait([self.submit(_cancel_remaining_tasks())], timeout=1.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=1.0)
        with contextlib.suppress(RuntimeError):
            self._loop.close()


async def _cancel_remaining_tasks() -> None:
    remaining = asyncio.all_tasks() - {asyncio.current_task()}
    for task in remaining:
        task.cancel()
    await asyncio.gather(*remaining, return_exceptions=True)


_worker_loop: WorkerLoop | None = None
_lock = threading.Lock()


def worker_loop() -> WorkerLoop:
    """Return the worker loop of this process, started if necessary."""
    global _worker_loop
    with _lock:
        if _worker_loop is None or _worker_loop.pid != os.getpid():
            _worker_loop = WorkerLoop()
        return _worker_loop
