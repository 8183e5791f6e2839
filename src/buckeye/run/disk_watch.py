"""Tells the user that a run waits for disk space: its own log may be on the disk that is full."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from buckeye.run.progress import human_duration
from buckeye.space import advice, waits_for_disk, what_is_free

log = logging.getLogger(__name__)

_TELL_SECONDS = 60.0


class DiskWatch:
    """Looks whether a process of the run in `output_dir` waits for disk space; tells its beginning, its end,
    and once a minute what could be freed. `note` records the events of both."""

    def __init__(self, output_dir: Path, *, note: Callable[..., None]) -> None:
        self._output_dir = output_dir
        self._note = note
        self._since: float | None = None
        self._told = 0.0

    def look(self, now: float) -> bool:
        """Whether one waits at `now`, in seconds on the monotonic clock."""
        if not waits_for_disk(self._output_dir):
            self._end(now)
            return False
        if self._since is None:
            self._since = now
            self._told = now - _TELL_SECONDS
            self._note("disk_full")
        if now >= self._told + _TELL_SECONDS:
            self._told = now
            free = what_is_free(self._output_dir)
            log.warning(
                "The run waits for disk space and goes on by itself when there is some: %s of the file "
                "system of %s are free. %s",
                free,
                self._output_dir,
                advice(self._output_dir),
            )
        return True

    def _end(self, now: float) -> None:
        if self._since is None:
            return
        waited, self._since = now - self._since, None
        log.info("There is disk space again; the run has waited for %s", human_duration(waited))
        self._note("disk_freed", seconds=round(waited))
