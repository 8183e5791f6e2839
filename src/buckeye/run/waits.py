"""Who waits for whom in a run that goes on, read from what its processes have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.run.record import RunRecord
from buckeye.storage import step_directories


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """`who` waits for `what` of `whom`, since a time in seconds since the epoch. A process that works waits
    for nobody: `whom` is None, and `what` is its work."""

    who: str
    whom: str | None
    what: str
    since: float


def waits(
    output_dir: Path,
    record: RunRecord,
    trained: Mapping[int, Mapping[str, Any]],
    collected: Mapping[int, Mapping[str, Any]],
) -> list[Wait]:
    """What orchestrator and trainer of this attempt do. `trained` and `collected` are the records of the
    trainer and the orchestrator in `metrics.jsonl`, by step."""
    starting = [known.title for known in record.processes if not known.ready]
    servers = [title for title in starting if title.startswith("inference")]
    trainers = [title for title in starting if title.startswith("trainer")]
    if servers or trainers:
        return _while_starting(record, servers, trainers)
    return [
        _orchestrator(output_dir, record, collected),
        _trainer(output_dir, record, trained),
    ]


def _while_starting(record: RunRecord, servers: list[str], trainers: list[str]) -> list[Wait]:
    since = record.started
    found = [Wait(who=name, whom=None, what="starts", since=since) for name in (*servers, *trainers)]
    first = (servers or trainers)[0]
    what = "its server" if servers else f"weights {record.start_step}"
    return [*found, Wait(who="orchestrator", whom=first, what=what, since=since)]


def _trainer(output_dir: Path, record: RunRecord, trained: Mapping[int, Mapping[str, Any]]) -> Wait:
    step, since = _next(record, trained)
    if record.max_steps is not None and step >= record.max_steps:
        return Wait(who="trainer", whom=None, what="all steps are done", since=since)
    batch = step_directories(output_dir / "batches").get(step)
    try:
        arrived = batch.stat().st_mtime if batch is not None else None
    except FileNotFoundError:
        arrived = None
    if arrived is None or arrived < record.started:  # none, or one of an earlier attempt
        return Wait(who="trainer", whom="orchestrator", what=f"batch {step}", since=since)
    return Wait(who="trainer", whom=None, what=f"trains on batch {step}", since=max(since, arrived))


def _orchestrator(output_dir: Path, record: RunRecord, collected: Mapping[int, Mapping[str, Any]]) -> Wait:
    step, since = _next(record, collected)
    if record.max_steps is not None and step >= record.max_steps:
        return Wait(who="orchestrator", whom=None, what="all batches are written", since=since)
    needed = max(record.start_step, step - record.max_async_level)
    if needed > max(step_directories(output_dir / "weights"), default=0):
        return Wait(who="orchestrator", whom="trainer", what=f"weights {needed}", since=since)
    return Wait(who="orchestrator", whom="inference", what=f"rollouts of batch {step}", since=since)


def _next(record: RunRecord, done: Mapping[int, Mapping[str, Any]]) -> tuple[int, float]:
    """The first step that this attempt has not done, and when it could begin with it."""
    newest = max(
        (step for step, values in done.items() if values["time"] >= record.started),
        default=record.start_step - 1,
    )
    since = done[newest]["time"] if newest >= record.start_step else record.started
    return newest + 1, since
