"""Looks at what a run records, and warns while it goes on."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from buckeye.base.json_lines import printable
from buckeye.base.process import ChildProcess, clean_environment
from buckeye.monitor.learning import NUMBERS, findings
from buckeye.monitor.metrics import HEAD, MetricsTail, RunMetrics

log = logging.getLogger(__name__)

_AGAIN_AFTER = (50, 500)
_FIRST_WHOLE = 8
"""The step after which all records are looked at; then whenever there are twice as many steps."""
_FIRST_SECONDS = 60.0  # what ends before is looked at then
_LOWEST_PRIORITY = 19
_LONGEST_SECONDS = 1800.0  # that it may take, as nobody gives it time
_KEPT = frozenset((*HEAD, *NUMBERS))


class RunWatch:
    """Follows the metrics of all processes of the run in `output_dir`, from its first step on."""

    def __init__(self, output_dir: Path) -> None:
        self._run = output_dir
        self._tail = MetricsTail(output_dir / "metrics.jsonl", 0)
        self._metrics = RunMetrics()
        self._told: set[str] = set()
        self._next = _FIRST_WHOLE
        self._not_before = time.monotonic() + _FIRST_SECONDS
        self._whole: tuple[ChildProcess, IO[bytes], float] | None = None
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
        self._tell_of_all()
        steps = self._metrics.steps()
        due = bool(steps) and steps[-1].number >= self._next and time.monotonic() >= self._not_before
        if due and self._whole is None:
            self._next = 2 * steps[-1].number
            self._look_at_all()

    def _look_at_all(self) -> None:
        """Have all that the run has recorded looked at, by a process that takes no time from this one."""
        out = tempfile.TemporaryFile()  # noqa: SIM115  it is closed when its process has ended
        argv = [sys.executable, "-m", "buckeye", "rl", "diagnose", str(self._run.absolute()), "--json"]
        env = clean_environment({"OMP_NUM_THREADS": "1"})
        try:
            child = ChildProcess(argv, env=env, stdout=out, stderr=out, guarded=True)
        except OSError as error:
            log.info("What may be wrong with the run could not be looked at: %s", error)
            return
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, child.pid, _LOWEST_PRIORITY)
        self._whole = child, out, time.monotonic() + _LONGEST_SECONDS

    def _tell_of_all(self) -> None:
        """If that process has ended, or has taken too long, warn once of what is sure."""
        if self._whole is None:
            return
        child, out, deadline = self._whole
        if child.returncode is None:
            if time.monotonic() < deadline:
                return
            child.end(0.0, session=False)
        self._whole = None
        with out:
            out.seek(0)
            said = out.read()
        try:
            found: list[dict[str, Any]] = json.loads(said)["findings"]
        except (ValueError, TypeError, KeyError):
            log.info("What may be wrong with the run could not be looked at: %s", printable(_last(said)))
            return
        for one in found:
            if one["confidence"] == "sure" and one["name"] not in self._sure:
                self._sure.add(one["name"])
                log.warning(
                    "%s: %s; %s. See: %s", *(one[key] for key in ("seen", "cause", "advice", "command"))
                )


def _last(said: bytes) -> str:
    """The last line that was printed."""
    return said.decode(errors="replace").strip().rpartition("\n")[2]
