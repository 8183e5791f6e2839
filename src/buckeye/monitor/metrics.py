"""`metrics.jsonl`: every process of a run appends one JSON object per event to the same file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends lines to `metrics.jsonl`. One `write(2)` per line, so several processes can share the file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, process: str, step: int, values: Mapping[str, Any]) -> None:
        """Append `{"time": seconds since the epoch, "process": ..., "step": ..., **values}`."""
        line = json.dumps({"time": round(time.time(), 3), "process": process, "step": step, **values})
        os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


class MetricsTail:
    """Follows `metrics.jsonl` from the byte `position` on, by default from where it ends now; `new` returns
    whole new records. `position` is where the next one begins."""

    def __init__(self, path: Path, position: int | None = None) -> None:
        self._path = path
        self.position = position if position is not None else path.stat().st_size if path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        """The records that were written since the last call. Lines that are not JSON (a process was killed
        while it wrote one) are left out."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self.position)
            data = file.read()
        complete = data.rfind(b"\n") + 1
        self.position += complete
        return list(_parsed(data[:complete].splitlines()))


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file in order; a torn last line (a process was killed there) is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from _parsed(file)


def latest_by_step(path: Path, process: str) -> dict[int, dict[str, Any]]:
    """Step -> newest record of one process. A step trained again after a resume replaces its first record."""
    return {r["step"]: r for r in read_metrics(path) if r["process"] == process}


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue
