"""Peak memory of a process and its children, for benchmarks that start programs."""

from __future__ import annotations

import threading
import time

import psutil


class Peak(threading.Thread):
    """Peak memory (PSS, GB) of a process and its children.

    It is checked twice a second, or less often if a check takes more than a fiftieth of the time.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._done = threading.Event()
        self.peak = 0.0

    def run(self) -> None:
        """Watch until `stop`."""
        seconds = 0.0
        while not self._done.wait(max(0.5, 50 * seconds)):
            began = time.monotonic()
            self.peak = max(self.peak, self._held())
            seconds = time.monotonic() - began

    def stop(self) -> float:
        """Stop watching, and return the peak."""
        self._done.set()
        self.join()
        return self.peak

    def _held(self) -> float:
        total = 0.0
        try:
            for process in (self._root, *self._root.children(recursive=True)):
                total += process.memory_full_info().pss / 1e9
        except psutil.Error:  # a process has just ended
            return 0.0
        return total
