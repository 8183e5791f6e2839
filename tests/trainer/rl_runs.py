"""Batches on disk and the records of a run, for the tests of the trainer process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from buckeye.base.process import RunIdentity
from buckeye.monitor.metrics import read_metrics
from buckeye.transport.batches import Batch, write_batch

ME = RunIdentity(run_id="local", attempt=1)


def put(output_dir: Path, batches: Iterable[Batch], identity: RunIdentity = ME) -> None:
    for batch in batches:
        write_batch(output_dir / "batches", batch, identity=identity)


def warnings(output_dir: Path) -> list[str]:
    """Return the warnings in a run's log, except the lines of steps."""
    lines = (output_dir / "logs" / "run.log").read_text().splitlines()
    found = (line.partition(" WARNING ") for line in lines)
    return [message for _, level, message in found if level and "Time:" not in message]


def records(output_dir: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(output_dir / "metrics.jsonl") if r["process"] == "trainer"]
