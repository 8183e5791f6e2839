"""Which kind of folder it is that rollouts are in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from buckeye import runs
from buckeye_audit.exchange.foreign import ForeignFolder, foreign_folder
from buckeye_audit.exchange.played import OwnRun, Source


def open_source(where: str | Path) -> tuple[Source, Path]:
    """What is in a directory, or the run of a name or id; and its directory. Raises UsageError where there
    is nothing."""
    foreign = foreign_folder(Path(where))
    if foreign is not None:
        return foreign, foreign.path
    run = runs.open(where)
    return OwnRun(run), run.path


@contextmanager
def opened_run(where: str | Path) -> Iterator[tuple[runs.Run, ForeignFolder | None]]:
    """A run to read. The results of another trainer are read as a run that is there for so long."""
    foreign = foreign_folder(Path(where))
    if foreign is None:
        yield runs.open(where), None
        return
    with tempfile.TemporaryDirectory(prefix="buckeye-results-") as folder:
        path = Path(folder) / foreign.name
        foreign.put(path)
        yield runs.Run(path), foreign
