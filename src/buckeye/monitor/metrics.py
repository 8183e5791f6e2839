"""`metrics.jsonl`: every process of a run appends one JSON object per event to the same file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from buckeye.lines import LineFile
from buckeye.process import run_identity
from buckeye.space import Writing


class MetricsLog:
    """Appends lines to `metrics.jsonl`, which several processes share. Where the disk is full it waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = LineFile(path)

    def write(self, process: str, step: int, values: Mapping[str, Any]) -> None:
        """Append `{"time": seconds since the epoch, "attempt": ..., "process": ..., "step": ..., **values}`.
        Raises DiskFullError as `write_when_room` does."""
        self.writing(process, step, values).finish()

    async def write_async(self, process: str, step: int, values: Mapping[str, Any]) -> None:
        """The same; other tasks go on meanwhile."""
        await self.writing(process, step, values).finish_async()

    def writing(self, process: str, step: int, values: Mapping[str, Any]) -> Writing[None]:
        """The same, to be done in a loop of one's own."""
        head = {"time": round(time.time(), 3), "attempt": run_identity().attempt}
        line = json.dumps({**head, "process": process, "step": step, **values}).encode() + b"\n"
        what = f"the metrics of {process} step {step}"
        return Writing(self._path, lambda: self._file.append(line), what=what, needed=0)

    def close(self) -> None:
        self._file.close()


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
    """Step -> newest record of one process. When a later attempt reaches a step, what
    earlier ones had recorded of it and of all after it no longer counts: it was not built upon."""
    found: dict[int, dict[str, Any]] = {}
    attempt = 0
    for record in read_metrics(path):
        if record["process"] != process:
            continue
        if record.get("attempt", attempt) > attempt:
            attempt = record["attempt"]
            found = {step: earlier for step, earlier in found.items() if step < record["step"]}
        found[record["step"]] = record
    return found


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
