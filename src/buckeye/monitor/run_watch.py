"""Watch of a run's metrics, with warnings during the run."""

from __future__ import annotations

import logging
from pathlib import Path

from buckeye.monitor.learning_findings import FINDING_METRICS, findings
from buckeye.monitor.metrics import RECORD_KEYS, MetricsTail, RunMetrics

log = logging.getLogger(__name__)

_AGAIN_AFTER = (50, 500)
_KEPT = frozenset((*RECORD_KEYS, *FINDING_METRICS))


class RunWatch:
    """Watch of the metrics of all processes of the run in `output_dir`, from its first step on."""

    def __init__(self, output_dir: Path) -> None:
        self._run = output_dir
        self._tail = MetricsTail(output_dir / "metrics.jsonl", 0)
        self._metrics = RunMetrics()
        self._reported: set[str] = set()

    def check(self) -> None:
        """Log a warning for each new finding. Repeat it ever more rarely while the finding persists."""
        for record in self._tail.read_new():
            self._metrics.add({name: record[name] for name in record.keys() & _KEPT})
        found = findings(self._metrics.steps(), self._run)
        for finding in found:
            if finding.name not in self._reported or finding.until - finding.since + 1 in _AGAIN_AFTER:
                log.warning("%s", finding)
        self._reported = {finding.name for finding in found}
