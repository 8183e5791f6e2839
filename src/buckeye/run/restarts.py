"""Inference servers that die are started again, within limits; everything else of a run goes on."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from buckeye.errors import RunError, UsageError
from buckeye.run.plan import Role
from buckeye.run.processes import Child, Processes, how_it_ended, obituary
from buckeye.transport.restarts import take_restart_requests

log = logging.getLogger(__name__)

_MOST = 3
_WINDOW_SECONDS = 600.0
_FIRST_DELAY_SECONDS = 1.0


class Restarts:
    """Starts the inference servers of a run anew: those that have ended, and those that the orchestrator asks
    for. The delays are `first_delay` seconds, twice that, and so on; the fourth end of a server within ten
    minutes ends the run, and so does one that refuses its settings. `note` is told which server, and how it
    ended."""

    def __init__(
        self,
        processes: Processes,
        output_dir: Path,
        *,
        first_delay: float = _FIRST_DELAY_SECONDS,
        note: Callable[[str, str], None] = lambda title, cause: None,
    ) -> None:
        self._processes = processes
        self._output_dir = output_dir
        self._first_delay = first_delay
        self._note = note
        self._ended: dict[int, list[float]] = defaultdict(list)
        self._due: list[tuple[float, Role]] = []
        take_restart_requests(output_dir)  # those of an earlier attempt are not for these servers

    def tend(self) -> None:
        """Look after the servers; to be called again and again. Raises RunError with the last lines of a
        server that ended too often."""
        for request in take_restart_requests(self._output_dir):
            for child in self._processes.of_kind("inference"):
                if request.url == f"http://127.0.0.1:{child.role.port}" and child.running:
                    log.warning("%s is ended to be started anew: %s", child.role.title, request.reason)
                    self._processes.kill(child)
        for child in self._processes.of_kind("inference"):
            code = child.returncode
            if code is not None:
                self._schedule(child, code)
        now = time.monotonic()
        for due in [due for due in self._due if due[0] <= now]:
            self._due.remove(due)
            self._processes.start(due[1])

    def _schedule(self, child: Child, code: int) -> None:
        now = time.monotonic()
        recent = [ended for ended in self._ended[child.role.index] if now - ended < _WINDOW_SECONDS]
        if code == UsageError.exit_code:
            raise RunError(obituary(child, code))
        if len(recent) == _MOST:
            raise RunError(
                f"{obituary(child, code)}\nIt had been started again {_MOST} times within "
                f"{_WINDOW_SECONDS / 60:.0f} minutes."
            )
        delay = self._first_delay * 2 ** len(recent)
        log.warning(
            "%s (log: %s). Starting it again in %g s, for the %d. of at most %d times within %.0f minutes",
            how_it_ended(child, code),
            child.stdout,
            delay,
            len(recent) + 1,
            _MOST,
            _WINDOW_SECONDS / 60,
        )
        self._note(child.role.title, how_it_ended(child, code))
        self._ended[child.role.index] = [*recent, now]
        self._due.append((now + delay, child.role))
        self._processes.forget(child)
