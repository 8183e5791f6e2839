"""Warnings and sample rollouts of a run's processes, for the launcher's screen.

Of similar warnings, the screen shows one per ten minutes. The others are counted.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

from buckeye.base.json_lines import LineTail, printable

_LINE = re.compile(
    r"\d{4}-\d\d-\d\d (?P<clock>[\d:]+),\d+ \[(?P<process>[^\]]+)\] +(?P<text>(?:WARNING|ERROR|SAMPLE) .*)"
)
_NUMBER = re.compile(r"\d+")
_KIND_CHARACTERS = 40
"""Warnings of one kind have equal prefixes of this length. Digits are ignored."""
_REPEAT_SECONDS = 600.0
_MAX_CHARACTERS = 500


class ChildWarnings:
    """Reader of the warnings and samples in the log that all processes of a run share.

    The reader starts at the current end of the log, and skips the lines of the process `own_process`. It
    returns at most one warning of each kind per ten minutes. `suppressed_count` counts the others.
    """

    def __init__(self, log: Path, *, own_process: str) -> None:
        self._tail = LineTail(log)
        self._own = own_process
        self._shown_at: dict[tuple[str, str], float] = {}
        self.suppressed_count = 0

    def read_new(self) -> list[str]:
        """Return the lines since the last call, such as `HH:MM:SS WARNING orchestrator: ...`.

        Returns nothing if the log cannot be read.
        """
        with suppress(OSError):
            lines = [line.decode("utf-8", "replace") for line in self._tail.read_new()]
            return [text for line in lines if (text := self._screen_line(line)) is not None]
        return []

    def _screen_line(self, line: str) -> str | None:
        match = _LINE.fullmatch(line)
        if match is None or match["process"] == self._own:
            return None
        level, _, message = match["text"].partition(" ")
        now = time.monotonic()
        kind = (_NUMBER.sub("", match["process"]), _NUMBER.sub("", match["text"])[:_KIND_CHARACTERS])
        if level != "SAMPLE" and now < self._shown_at.get(kind, -_REPEAT_SECONDS) + _REPEAT_SECONDS:
            self.suppressed_count += 1
            return None
        self._shown_at[kind] = now
        return f"{match['clock']} {level:>7} {match['process']}: {printable(message[:_MAX_CHARACTERS])}"
