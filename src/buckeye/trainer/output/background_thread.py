"""Thread that writes output while training continues."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue

from buckeye.base import heartbeat
from buckeye.errors import RunError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LOG_SECONDS = 60.0


class BackgroundThread:
    """Daemon thread that runs functions one after another. `check` and `wait` raise the error of a function.

    They also raise `RunError` if the functions take longer than `timeout` seconds.
    """

    def __init__(self, timeout: float = math.inf) -> None:
        self._queue: SimpleQueue[tuple[list[Future[None]], Future[None], Callable[[], None]]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._timeout = timeout
        self._what = ""
        self._began = 0.0
        self._work: list[Future[None]] = []

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Wait for the previous functions, then start `work`. Messages call its result `what`."""
        self.wait()
        self._what, self._began = what, time.monotonic()
        self.then(work)

    def then(self, work: Callable[[], None]) -> None:
        """Call `work` after the previous function, unless that fails."""
        if self._thread is None:
            # not a thread pool: a pool delays the end of the process until a function that hangs has ended
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()
        previous, future = self._work[-1:], Future[None]()
        self._work.append(future)
        self._queue.put((previous, future, work))

    def _run(self) -> None:
        while True:
            previous, future, work = self._queue.get()
            error: BaseException | None = None
            try:
                for earlier in previous:
                    earlier.result()
                work()
            except BaseException as caught:
                error = caught
            # Free the data before the result is known: this process may then end, and torch aborts a process
            # whose thread frees tensors at its end.
            del previous, work
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
            del future, error

    @property
    def is_busy(self) -> bool:
        """True while a function is running."""
        return any(not work.done() for work in self._work)

    def check(self) -> None:
        """Raise the error of the first function that has failed, if any, or `RunError` after the timeout."""
        while self._work and self._work[0].done():
            work = self._work.pop(0)
            if work.exception() is not None:
                self._work.clear()
            work.result()
        if self._work and time.monotonic() > self._began + self._timeout:
            self._work.clear()
            raise RunError(
                f"{self._what} were not written within {self._timeout:.0f} s",
                code="BK-WEIGHTS-TIMEOUT",
                hint="check the file system of output_dir",
            )

    def wait(self) -> None:
        """Wait until all functions have ended, then raise the first error, if any."""
        began = logged = time.monotonic()
        if self.is_busy:
            heartbeat.report(f"{self._what} to be written", on="disk")
            wait(self._work, timeout=_POLL_SECONDS)
        if self.is_busy:
            logger.info("Waiting for %s to be written", self._what)
        while self.is_busy:
            wait(self._work, timeout=_POLL_SECONDS)
            if time.monotonic() > logged + _LOG_SECONDS:
                logged = time.monotonic()
                logger.info("Still waiting for %s after %.0f s", self._what, logged - began)
            self.check()
        self.check()
