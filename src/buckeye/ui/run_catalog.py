"""Runs to show, and access to the current data of each run."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.errors import UsageError
from buckeye.monitor.metrics import MetricsTail, RunMetrics, StepMetrics
from buckeye.run_files.known_runs import find_run, known_runs
from buckeye.runs import Run

_RUN_MARKERS = frozenset({"run.json", "status.json", "metrics.jsonl", "rollouts"})
_MAX_DEPTH = 3
_MAX_FOLDERS = 5_000  # to visit, so that a scan of a home directory ends soon


@dataclass
class OpenRun:
    """Run that the page shows as `name`. Metrics are cached and updated. All other data is read on request.

    Several threads may use this object.
    """

    name: str
    path: Path
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _reading: Run | None = None
    _tail: MetricsTail | None = None
    _metrics: RunMetrics = field(default_factory=RunMetrics)
    diagnosis_lock: threading.Lock = field(default_factory=threading.Lock)
    cache: dict[str, Any] = field(default_factory=dict)
    """Cached results, by name."""

    @property
    def steps(self) -> list[StepMetrics]:
        """All metrics recorded until now, joined by step, in order."""
        path = self.path / "metrics.jsonl"
        with self._lock:
            size = path.stat().st_size if path.exists() else 0
            if self._tail is None or size < self._tail.position:  # the file was replaced
                self._tail, self._metrics = MetricsTail(path, 0), RunMetrics()
            for record in self._tail.read_new():
                self._metrics.add(record)
            return self._metrics.steps()

    @contextmanager
    def read(self) -> Iterator[Run]:
        """Yield the run for reading. Only one thread at a time can read it.

        The first use of `Run.index` builds this index. Nested blocks share one `Run`.
        """
        with self._lock:
            if self._reading is not None:
                yield self._reading
                return
            run = self._reading = Run(self.path)
            try:
                yield run
            finally:
                self._reading = None
                if "index" in run.__dict__:
                    run.index.close()

    def stamp(self) -> Mapping[str, int]:
        """Return values that change when the run has new metrics, events, state, rollouts or evaluations."""
        names = ("metrics.jsonl", "events.jsonl", "status.json", "rollouts", "evals")
        return {name.partition(".")[0]: _changed(self.path / name) for name in names}


def _changed(path: Path) -> int:
    try:
        seen = path.stat()
    except OSError:
        return 0
    return zlib.crc32(f"{seen.st_mtime_ns} {seen.st_size if path.suffix else 0}".encode())


class RunCatalog:
    """Runs to show. `word` is a directory of runs, or a run. None: the runs in ./outputs, and all known runs.

    Raise `UsageError` if `word` is neither a directory with a run nor a known run.
    """

    def __init__(self, word: str | None) -> None:
        self.place = None if word is None else Path(word)
        if word is not None and not Path(word).is_dir():
            self.place = find_run(word)
        self._open: dict[str, OpenRun] = {}
        if self.place is not None and not self.all():
            raise UsageError(
                f"{word} is a directory without a run",
                code="BK-RUN-NOT-FOUND",
                hint="`buckeye rl list` shows known runs",
            )

    def all(self) -> list[OpenRun]:
        """Return the runs that exist now, each with a unique name that does not change."""
        for path in self._paths():
            if all(path != known.path for known in self._open.values()):
                name = path.name
                if name in self._open:
                    name = f"{name}-{zlib.crc32(os.fsencode(path)):08x}"
                self._open[name] = OpenRun(name, path)
        return [run for run in self._open.values() if run.path.is_dir()]

    @property
    def only(self) -> str | None:
        """Name of the run if `word` selected a single run, else None."""
        runs = self.all()
        return runs[0].name if [run.path for run in runs] == [self.place and self.place.absolute()] else None

    def find(self, name: str) -> OpenRun:
        """Return the run with this name. Raise `UsageError` for an unknown name."""
        found = self._open.get(name) or next((run for run in self.all() if run.name == name), None)
        if found is None:
            raise UsageError(f"no run is named {name!r}", code="BK-RUN-NOT-FOUND")
        return found

    def _paths(self) -> Iterator[Path]:
        if self.place is not None:
            yield from _runs_in(self.place.absolute())
            return
        here = Path("outputs").absolute()
        yield from _runs_in(here)
        for run in known_runs()[0]:
            if run.directory.absolute() != here:
                yield run.directory.absolute()


def _runs_in(top: Path) -> Iterator[Path]:
    """Yield the runs in a directory, which may itself be a run. Links to folders are not followed."""
    for looked, (folder, folders, files) in enumerate(os.walk(top)):
        path = Path(folder)
        if not _RUN_MARKERS.isdisjoint((*files, *folders)):
            yield path
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if len(path.relative_to(top).parts) >= _MAX_DEPTH or looked > _MAX_FOLDERS:
            folders.clear()
