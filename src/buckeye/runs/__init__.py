"""Past and current runs: read (`open`), status, stop, clean, fork, export."""

from buckeye.runs.reader import Run
from buckeye.runs.reader import open_run as open

__all__ = ["Run", "open"]
