"""Logging setup of every process: `HH:MM:SS    LEVEL message`, to stdout and to the run's log file."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from buckeye.base.json_lines import LineStream, printable
from buckeye.base.terminal import has_escape_codes
from buckeye.monitor.console import protect_output

SUCCESS = 25
"""Level between INFO and WARNING: an event that the user waits for."""

SAMPLE = 21
"""Level between INFO and SUCCESS: an example of a rollout, which the launcher also shows."""

_COLOURS = {"DEBUG": "\x1b[2m", "SUCCESS": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m"}


class _Formatter(logging.Formatter):
    """Formatter of the console."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__("%(asctime)s %(levelname)7s %(message)s", datefmt="%H:%M:%S")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        line = printable(super().format(record))
        code = _COLOURS.get(record.levelname) if self._colour else None
        return f"{code}{line}\x1b[0m" if code else line


def setup_logging(level: str, process: str, log_file: Path | None) -> None:
    """Send Buckeye's log lines to stdout (colored only on a terminal) and, if given, to a file.

    All processes of a run append whole lines to one file, each with its process name.
    """
    logging.addLevelName(SUCCESS, "SUCCESS")
    logging.addLevelName(SAMPLE, "SAMPLE")
    root = logging.getLogger("buckeye")
    former = list(root.handlers)
    root.handlers.clear()
    for handler in former:
        handler.close()
    protect_output()
    stream = logging.StreamHandler(sys.stdout)
    colour = has_escape_codes(sys.stdout) and not os.environ.get("NO_COLOR")
    stream.setFormatter(_Formatter(colour=colour))
    handlers: list[logging.Handler] = [stream]
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        to_file = _FileHandler(log_file)
        to_file.setFormatter(logging.Formatter(f"%(asctime)s [{process}] %(levelname)7s %(message)s"))
        handlers.append(to_file)
    root.setLevel("WARNING" if level == "warn" else level.upper())
    root.propagate = False
    root.handlers[:] = handlers


class _FileHandler(logging.StreamHandler[LineStream]):
    """Handler that appends whole lines to a file shared with other processes."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        super().__init__(LineStream(self._descriptor))

    def close(self) -> None:
        super().close()
        if self._descriptor >= 0:  # several loggers share the handler, and each may close it
            os.close(self._descriptor)
            self._descriptor = -1


def run_log(output_dir: Path) -> Path:
    """Return the log file of a run, shared by its processes."""
    return output_dir / "logs" / "run.log"
