"""One thing that goes on beside training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from buckeye.base import heartbeat

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_TELL_SECONDS = 60.0


class Background:
    """Runs one piece of work at a time on a thread. What it raises is raised here, later."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what = ""
        self._error: BaseException | None = None

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Begin some work; `what` names it in messages. Waits for the one before."""
        self.wait()
        self._what = what
        self._thread = threading.Thread(target=self._run, args=(work,), name=what, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether some work goes on."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what the work has raised, if it has by now."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until the work is done; then as `check`. It has deadlines of its own for all that it waits for."""
        began = told = time.monotonic()
        thread = self._thread
        if thread is not None and thread.is_alive():
            logger.info("Waiting for %s, which is still being written", self._what)
        while thread is not None and thread.is_alive():
            heartbeat.report(f"{self._what} to be written", on="disk")
            thread.join(_POLL_SECONDS)
            if time.monotonic() > told + _TELL_SECONDS:
                told = time.monotonic()
                logger.info("Still waiting for %s, for %.0f s", self._what, told - began)
        self._thread = None
        self.check()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
