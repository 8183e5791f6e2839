"""Output of a worker: its last lines for error messages, a log of limited size, and detection of floods."""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

_TAIL_BYTES = 1_500
_WINDOW_SECONDS = 60.0
_MAX_LOG_BYTES = 32 * 1024 * 1024


class WorkerOutput:
    """Output of one worker.

    A log larger than `_MAX_LOG_BYTES` is renamed to NAME.old, and a new log begins.
    """

    def __init__(self, log: Path | None, *, max_bytes: int) -> None:
        self._log, self._max_bytes = log, max_bytes
        self._file: BinaryIO | None = None
        self._tail = b""
        self._window_start, self._window_bytes = time.monotonic(), 0
        self.total = 0

    def add(self, chunk: bytes) -> bool:
        """Add printed bytes. Return False if the worker has printed more than `max_bytes` within a minute."""
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        self.total += len(chunk)
        now = time.monotonic()
        if now - self._window_start > _WINDOW_SECONDS:
            self._window_start, self._window_bytes = now, 0
        self._window_bytes += len(chunk)
        self._write(chunk)
        return self._window_bytes <= self._max_bytes

    def tail(self) -> str:
        """Return the last lines, or "" if nothing was printed."""
        return self._tail.decode("utf-8", "replace").strip()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, chunk: bytes) -> None:
        if self._log is None:
            return
        try:
            if self._file is None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._log.open("ab", buffering=0)
            self._file.write(chunk)
            if self._file.tell() > _MAX_LOG_BYTES:
                self.close()
                self._log.replace(self._log.with_name(f"{self._log.name}.old"))
        except OSError:  # a full disk must not stop the environment; the tail is still available
            self._log = None
            self.close()
