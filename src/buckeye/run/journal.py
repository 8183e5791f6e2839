"""`events.jsonl`: what happened to a run, one JSON object an event, over all its attempts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from buckeye.monitor.metrics import read_metrics

EVENTS_FILE = "events.jsonl"

EventKind = Literal[
    "start",
    "process",
    "ready",
    "restart",
    "checkpoint",
    "weights",
    "stopping",
    "stop",
    "failure",
    "finish",
    "fork",
]


def write_event(output_dir: Path, event: EventKind, *, attempt: int, **details: Any) -> None:
    """Append `{"time": seconds since the epoch, "event": ..., "attempt": ..., **details}`: one `write(2)`, so
    that a reader, or a second writer, never sees half of it."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, "attempt": attempt, **details})
    handle = os.open(output_dir / EVENTS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode() + b"\n")
    finally:
        os.close(handle)


def read_events(output_dir: Path) -> Iterator[dict[str, Any]]:
    """The events of a run in order; none for a run that has no journal."""
    return read_metrics(output_dir / EVENTS_FILE)
