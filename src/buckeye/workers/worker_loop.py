"""Thread with its own event loop, which serves and watches all workers of this process.

Code of any thread and any event loop can therefore use workers. The thread also watches workers while the
event loop of the rollouts is blocked. The first worker starts the thread.
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
    """Thread with an event loop, and the worker pools to close when this process exits.

    The exit also waits for pools that are being closed, because a transport that outlives its event loop
    fails with "Event loop is closed".
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
        """Run a coroutine in this loop, and wait for it in the event loop of the caller."""
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
        """Close a pool when this process exits, and return a function that closes it earlier.

        The function does not wait until the pool is closed. Any thread may call it at any time.
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
        """Remove a pool. The caller closes it."""
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
    """Return the worker loop of this process. The first call starts it."""
    global _worker_loop
    with _lock:
        if _worker_loop is None or _worker_loop.pid != os.getpid():
            _worker_loop = WorkerLoop()
        return _worker_loop
