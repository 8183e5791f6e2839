"""Looks at what a run records, and warns while it goes on."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from buckeye.monitor.metrics import HEAD, MetricsTail, RunMetrics
from buckeye_audit.diagnosis.learning import NUMBERS, findings

log = logging.getLogger(__name__)

_AGAIN_AFTER = (50, 500)
_FIRST_WHOLE = 8
"""The step after which all records are looked at; then whenever there are twice as many steps."""
_KEPT = frozenset((*HEAD, *NUMBERS))


class RunWatch:
    """Follows the metrics of all processes of the run in `output_dir`, from its first step on."""

    def __init__(self, output_dir: Path) -> None:
        self._run = output_dir
        self._tail = MetricsTail(output_dir / "metrics.jsonl", 0)
        self._metrics = RunMetrics()
        self._told: set[str] = set()
        self._next = _FIRST_WHOLE
        self._whole: threading.Thread | None = None
        self._sure: set[str] = set()

    def look(self) -> None:
        """Warn of what is found now and was not at the last look, and seldom again."""
        for record in self._tail.new():
            self._metrics.add({name: record[name] for name in record.keys() & _KEPT})
        found = findings(self._metrics.steps(), self._run)
        for one in found:
            if one.name not in self._told or one.until - one.since + 1 in _AGAIN_AFTER:
                log.warning("%s", one)
        self._told = {one.name for one in found}
        steps = self._metrics.steps()
        if steps and steps[-1].number >= self._next and (self._whole is None or not self._whole.is_alive()):
            self._next = 2 * steps[-1].number
            self._whole = threading.Thread(target=self._look_at_all, daemon=True)
            self._whole.start()

    def _look_at_all(self) -> None:
        """Look at all that the run has recorded, and warn once of what is sure."""
        from buckeye_audit.diagnosis.command import found_in

        for one in found_in(self._run):
            if one.confidence == "sure" and one.name not in self._sure:
                self._sure.add(one.name)
                log.warning("%s", one)
