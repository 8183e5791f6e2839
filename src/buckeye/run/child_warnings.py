"""The warnings of a run's processes for the screen of its launcher: the first of each kind; others count."""

from __future__ import annotations

import re
from pathlib import Path

_LINE = re.compile(
    r"\d{4}-\d\d-\d\d (?P<clock>[\d:]+),\d+ \[(?P<process>[^\]]+)\] +(?P<text>(?:WARNING|ERROR) .*)"
)
_NUMBER = re.compile(r"\d+")
_KIND = 40
"""Characters by which warnings are told apart, numbers left out: what follows differs from case to case."""


class ChildWarnings:
    """Reads the log that all processes of a run share, from where it ends now on. Lines of the process `own`
    are left out; `unshown` counts warnings of which one of the same kind was returned before."""

    def __init__(self, log: Path, *, own: str) -> None:
        self._log = log
        self._own = own
        self._position = log.stat().st_size if log.exists() else 0
        self._kinds: set[tuple[str, str]] = set()
        self.unshown = 0

    def new(self) -> list[str]:
        """What was written since the last call: `HH:MM:SS WARNING orchestrator: ...`."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        complete = data.rfind(b"\n") + 1
        self._position += complete
        lines = data[:complete].decode("utf-8", "replace").split("\n")
        return [shown for line in lines if (shown := self._shown(line)) is not None]

    def _shown(self, line: str) -> str | None:
        match = _LINE.fullmatch(line)
        if match is None or match["process"] == self._own:
            return None
        level, _, message = match["text"].partition(" ")
        kind = (_NUMBER.sub("", match["process"]), _NUMBER.sub("", match["text"])[:_KIND])
        if kind in self._kinds:
            self.unshown += 1
            return None
        self._kinds.add(kind)
        return f"{match['clock']} {level:>7} {match['process']}: {message}"
