"""What is known of a run, put together from its directory and the processes there are."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from buckeye.checkpoint import CheckpointInfo, read_scores
from buckeye.monitor.log import run_log
from buckeye.monitor.metrics import latest_by_step
from buckeye.run.export.choose import choose_checkpoint
from buckeye.run.export.facts import evaluation_reach, read_config
from buckeye.run.processes import last_lines
from buckeye.run.record import GOING_ON, ProcessRecord, RunRecord, State, read_record
from buckeye.run.resume import where_it_left_off
from buckeye.run.waits import Wait, waits
from buckeye.space import free_bytes, size_of, waits_for_disk

_TREND_STEPS = 10
_PACE_STEPS = 20
_ERROR_LINE = re.compile(r"\] +ERROR (.*)")
_LAST_WORDS = re.compile(r"^ *\| (?:error: |.*\] +ERROR |(?=[\w.]+(?:Error|Exception): ))(.*)")
"""In the reason of a failure, a line of the failed process: its message, or the end of a traceback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """A process of a run that goes on."""

    title: str
    pid: int
    port: int | None
    restarts: int
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run as it is now. `step` counts the trained steps; `reward` is that of the last batch, and
    `reward_change` the mean of the last ten less that of the ten before; sizes are in bytes, times in seconds
    since the epoch. What is not known is None."""

    name: str
    run_id: str
    directory: str
    host: str
    state: State
    reason: str | None
    attempt: int
    step: int
    max_steps: int | None
    reward: float | None
    reward_change: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    last_step_time: float | None
    started: float
    ended: float | None
    restarts: int
    processes: list[ProcessStatus]
    waits: list[Wait]
    checkpoint_step: int | None
    last_error: str | None
    disk_used: int | None
    disk_free: int
    waits_for_disk: bool


def run_status(output_dir: Path, *, measure_disk: bool = True) -> RunStatus:
    """Look at a run. Raises UsageError if nothing is recorded there."""
    record = read_record(output_dir)
    state = record.actual_state()
    trained = latest_by_step(output_dir / "metrics.jsonl", "trainer")
    collected = latest_by_step(output_dir / "metrics.jsonl", "orchestrator")
    step = _steps_done(record, trained)
    going_on = state in GOING_ON
    checkpoint = newest_checkpoint(output_dir)
    return RunStatus(
        name=output_dir.absolute().name,
        run_id=record.run_id,
        directory=str(output_dir.absolute()),
        host=record.host,
        state=state,
        reason=record.reason,
        attempt=record.attempt,
        step=step,
        max_steps=record.max_steps,
        reward=_last_reward(collected),
        reward_change=_reward_change(collected),
        tokens_per_second=_newest(collected).get("perf/throughput") if going_on else None,
        seconds_left=_seconds_left(record, trained, step) if going_on else None,
        last_step_time=_newest(trained).get("time"),
        started=record.started,
        ended=record.ended,
        restarts=record.restarts,
        processes=[_process_status(known, record) for known in record.processes],
        waits=waits(record) if state in ("starting", "running") else [],
        checkpoint_step=checkpoint.step if checkpoint is not None else None,
        last_error=_last_error(output_dir, record),
        disk_used=size_of(output_dir) if measure_disk else None,
        disk_free=free_bytes(output_dir),
        waits_for_disk=waits_for_disk(output_dir),
    )


def newest_checkpoint(output_dir: Path) -> CheckpointInfo | None:
    """The checkpoint that a resume would start from."""
    return where_it_left_off(output_dir)


def find_checkpoint(output_dir: Path, step: str) -> CheckpointInfo:
    """The checkpoint that best, last or a number means. Raises UsageError for a best one where nothing was
    evaluated, and CheckpointError where there is no such checkpoint."""
    _, config = read_config(output_dir)
    scores = read_scores(output_dir)
    return choose_checkpoint(output_dir, step, scores, reach=evaluation_reach(config)).info


def _steps_done(record: RunRecord, trained: Mapping[int, Mapping[str, Any]]) -> int:
    steps = [step + 1 for step, values in trained.items() if _of_attempt(values, record)]
    return max(steps, default=record.start_step)


def _of_attempt(values: Mapping[str, Any], record: RunRecord) -> bool:
    """Whether a record is of the newest attempt. Its time says nothing: clocks are set."""
    return values.get("attempt", record.attempt) == record.attempt


def _newest(records: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any]:
    return records[max(records)] if records else {}


def _last_reward(collected: Mapping[int, Mapping[str, Any]]) -> float | None:
    return _newest(collected).get("reward/mean")


def _reward_change(collected: Mapping[int, Mapping[str, Any]]) -> float | None:
    rewards = [values["reward/mean"] for _, values in sorted(collected.items()) if "reward/mean" in values]
    if len(rewards) < 2 * _TREND_STEPS:
        return None
    before, last = rewards[-2 * _TREND_STEPS : -_TREND_STEPS], rewards[-_TREND_STEPS:]
    return statistics.fmean(last) - statistics.fmean(before)


def _seconds_left(record: RunRecord, trained: Mapping[int, Mapping[str, Any]], step: int) -> float | None:
    """At the pace of the last steps of this attempt."""
    times = [values["time"] for _, values in sorted(trained.items()) if _of_attempt(values, record)]
    times = times[-_PACE_STEPS:]
    if record.max_steps is None or len(times) < 2:
        return None
    per_step = statistics.median(later - earlier for earlier, later in pairwise(times))  # one may be a jump
    return max(0.0, per_step * (record.max_steps - step) - max(0.0, time.time() - times[-1]))


def _process_status(known: ProcessRecord, record: RunRecord) -> ProcessStatus:
    if record.elsewhere:
        state = "not seen from here"
    elif known.node == 0 and known.process() is None:
        state = "gone"
    else:
        state = "ready" if known.ready else "starting"
    return ProcessStatus(
        title=known.title, pid=known.pid, port=known.port, restarts=known.restarts, state=state
    )


def _last_error(output_dir: Path, record: RunRecord) -> str | None:
    """What the process said that ended the run; where that is not known, the newest error in the log."""
    reason = record.reason if record.state == "failed" and record.reason is not None else ""
    for line in reversed(reason.splitlines()):
        if match := _LAST_WORDS.search(line):
            return match[1]
    for line in reversed(last_lines(run_log(output_dir), 500)):
        if match := _ERROR_LINE.search(line):
            return match[1]
    return None
