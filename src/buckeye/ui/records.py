"""Logs, events and settings of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from buckeye.base.columns import quoted
from buckeye.errors import BuckeyeError, UsageError
from buckeye.monitor.redact import redact
from buckeye.run_files.directory import LOG_FOLDER
from buckeye.run_files.events import read_events
from buckeye.run_files.logs import attempt_starts, read_logs
from buckeye.ui.run_catalog import OpenRun

_MOST_BYTES = 128_000_000  # total size of logs to read
_LONGEST_LINE = 4_000
_MOST_EVENTS = 20_000


class LogSelection(msgspec.Struct, forbid_unknown_fields=True):
    """Selection of log lines: the last `lines` lines that match all other fields.

    `attempt=None` selects the newest attempt, and `process=None` all processes.
    """

    attempt: int | None = None
    process: str | None = None
    text: str = ""
    lines: int = 1000


def logs(run: OpenRun, asked: LogSelection) -> dict[str, Any]:
    """Return log lines in order of time. `found` is the number of all matching lines."""
    try:
        attempts = sorted(attempt_starts(run.path))
    except BuckeyeError as error:
        return {"attempts": [], "processes": [], "found": 0, "lines": [], "missing": str(error)}
    size = sum(path.stat().st_size for path in (run.path / LOG_FOLDER).rglob("*") if path.is_file())
    if size > _MOST_BYTES:
        raise UsageError(
            f"the logs are too large to show: {size / 1e6:.0f} MB",
            code="BK-FILE-UNREADABLE",
            hint=f"run: buckeye rl logs {quoted(run.path)}",
        )
    lines = read_logs(run.path, attempt=asked.attempt)
    wanted = asked.text.casefold()
    found = [
        line for line in lines if asked.process in (None, "", line.process) and wanted in line.text.casefold()
    ]
    return {
        "attempts": attempts,
        "processes": sorted({line.process for line in lines}),
        "found": len(found),
        "lines": [
            {"time": line.time, "process": line.process, "text": line.text[:_LONGEST_LINE]}
            for line in found[-max(1, min(asked.lines, 20_000)) :]
        ],
        "missing": None,
    }


def events(run: OpenRun) -> dict[str, Any]:
    """Return the newest events in order. `left_out` is the number of older events."""
    found = list(read_events(run.path))
    return {"events": found[-_MOST_EVENTS:], "left_out": max(0, len(found) - _MOST_EVENTS)}


def settings(run: OpenRun) -> dict[str, Any]:
    """Return all settings from `configs/rl.json`, and the changes by each resume, without secrets."""
    from buckeye.launch.changed_settings import settings_history  # slow: it imports the settings

    with run.read() as opened:
        return {
            "settings": redact(opened.settings),
            "changes": [asdict(change) for change in settings_history(run.path)],
        }
