"""One thread of this process with an event loop of its own, in which all workers are watched.

So a worker can be asked by code that waits and by code of any event loop, and is watched while the loop of
the rollouts is busy. Started with the first worker.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_LONGEST_END = 15.0


class Closing(Protocol):
    """Something with processes, that must be closed before this process ends."""

    async def close(self) -> None: ...


class Hub:
    """The thread, and what is to be closed at the end. What is just being closed by then is waited for, too:
    a transport that outlives the event loop says only "Event loop is closed"."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open: set[Closing] = set()
        self._closings: set[concurrent.futures.Future[None]] = set()
        self._thread = threading.Thread(target=self._run, name="environment-workers", daemon=True)
        self._thread.start()
        atexit.register(self._end)
        self.pid = os.getpid()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine there. To cancel the future is to cancel the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, from any event loop."""
        return await asyncio.wrap_future(self.submit(work))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it. It has deadlines of its own."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def register(self, closing: Closing) -> Callable[[], None]:
        """Have it closed when this process ends. The function that is returned closes it without waiting, and
        may be called at any time, from any thread."""
        self._open.add(closing)

        def close() -> None:
            if closing in self._open and os.getpid() == self.pid and not self._loop.is_closed():
                self._open.discard(closing)
                ending = self.submit(closing.close())
                self._closings.add(ending)
                ending.add_done_callback(self._closings.discard)

        return close

    def forget(self, closing: Closing) -> None:
        """It is closed."""
        self._open.discard(closing)

    def _end(self) -> None:
        if os.getpid() != self.pid:
            return
        closings = [*self._closings.copy(), *(self.submit(closing.close()) for closing in list(self._open))]
        concurrent.futures.wait(closings, timeout=_LONGEST_END)
        concurrent.futures.wait([self.submit(_cancel_the_rest())], timeout=1.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=1.0)
        with contextlib.suppress(RuntimeError):
            self._loop.close()


async def _cancel_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


_hub: Hub | None = None
_lock = threading.Lock()


def hub() -> Hub:
    """The hub of this process."""
    global _hub
    with _lock:
        if _hub is None or _hub.pid != os.getpid():
            _hub = Hub()
        return _hub
