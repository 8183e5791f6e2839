"""Which kind of folder it is that rollouts are in."""

from __future__ import annotations

from pathlib import Path

from buckeye import runs
from buckeye_audit.exchange.foreign import ForeignFolder
from buckeye_audit.exchange.played import OwnRun, Source


def open_source(where: str | Path) -> tuple[Source, Path]:
    """What is in a directory, or the run of a name or id; and its directory. Raises UsageError where there
    is nothing."""
    foreign = ForeignFolder(Path(where))
    if next(foreign.files(), None) is not None:
        return foreign, foreign.path
    run = runs.open(where)
    return OwnRun(run), run.path
