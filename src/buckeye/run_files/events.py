"""`events.jsonl`: the events of a run, one JSON object each, over all its attempts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from buckeye.base.disk import is_disk_full
from buckeye.base.json_lines import LineFile, read_json_lines

EVENTS_FILE = "events.jsonl"
_MAX_TIME = 1e11  # seconds since the epoch; later times cannot be formatted as dates

EventKind = Literal[
    "start",
    "attempt",
    "process",
    "ready",
    "restart",
    "stall",
    "forecast",
    "checkpoint",
    "weights",
    "stopping",
    "stop",
    "failure",
    "finish",
    "fork",
    "tune",
]


def write_event(output_dir: Path, event: EventKind, *, attempt: int, **details: Any) -> None:
    """Append `{"time": seconds since the epoch, "event": ..., "attempt": ..., **details}`.

    If the disk is full, the event is dropped.
    """
    path = output_dir / EVENTS_FILE
    line = json.dumps({"time": round(time.time(), 3), "event": event, "attempt": attempt, **details})
    try:
        with closing(LineFile(path)) as file:
            file.append(line.encode() + b"\n")
    except OSError as error:
        if not is_disk_full(error):
            raise


def read_events(output_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run in order. Skip invalid lines. A missing file has no events."""
    return (event for event in read_json_lines(output_dir / EVENTS_FILE) if _is_event(event))


def _is_event(record: dict[str, Any]) -> bool:
    seconds, attempt = record.get("time"), record.get("attempt")
    return (
        isinstance(seconds, int | float)
        and 0 <= seconds < _MAX_TIME
        and isinstance(attempt, int)
        and isinstance(record.get("event"), str)
    )
