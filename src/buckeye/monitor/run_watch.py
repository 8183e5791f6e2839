"""Warnings during a run about findings in its metrics."""

from __future__ import annotations

import logging
from pathlib import Path

from buckeye.monitor.learning_findings import FINDING_METRICS, findings
from buckeye.monitor.metrics import RECORD_KEYS, MetricsTail, RunMetrics

log = logging.getLogger(__name__)

_REPEAT_AFTER_STEPS = (50, 500)
_KEPT = frozenset((*RECORD_KEYS, *FINDING_METRICS))


class RunWatch:
    """Check of the metrics that all processes of the run in `output_dir` have recorded since its start."""

    def __init__(self, output_dir: Path) -> None:
        self._run = output_dir
        self._tail = MetricsTail(output_dir / "metrics.jsonl", 0)
        self._metrics = RunMetrics()
        self._reported: set[str] = set()

    def check(self) -> None:
        """Log a warning for each new finding.

        Repeat the warning when the finding has lasted 50 and 500 steps.
        """
        for record in self._tail.read_new():
            self._metrics.add({name: record[name] for name in record.keys() & _KEPT})
        found = findings(self._metrics.steps(), self._run)
        for finding in found:
            if finding.name not in self._reported or finding.until - finding.since + 1 in _REPEAT_AFTER_STEPS:
                log.warning("%s", finding)
        self._reported = {finding.name for finding in found}
