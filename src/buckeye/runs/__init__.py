"""Runs that were started before: read (`open`), seen, stopped, cleaned, forked, exported."""

from buckeye.runs.reader import Run
from buckeye.runs.reader import open_run as open

__all__ = ["Run", "open"]
