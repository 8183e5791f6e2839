"""Status of a run, from its directory and its processes."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from buckeye.base.disk import free_bytes, size_of
from buckeye.base.storage import read_json
from buckeye.launch.processes import last_lines
from buckeye.launch.resume import find_resume_checkpoint
from buckeye.launch.waits import Wait, waits
from buckeye.monitor.learning_findings import findings
from buckeye.monitor.log import run_log
from buckeye.monitor.metrics import Record, StepMetrics, read_run_metrics
from buckeye.run_files.known_runs import current_record, read_remote_run
from buckeye.run_files.record import ACTIVE_STATES, STATUS_FILE, ProcessRecord, RunRecord, RunState
from buckeye.runs.checkpoint_facts import choose_checkpoint
from buckeye.transport.checkpoint import UPLOADS_FILE, CheckpointInfo, read_scores

TREND_STEPS = 10
"""Number of steps that the reward is averaged over."""

STALE_SECONDS = 60.0
"""An active run without a report for this time is stale."""

_PACE_STEPS = 20
_ROLLOUT_WORKER = "buckeye.cli.rollout_worker"
_ERROR_LINE = re.compile(r"\] +ERROR (.*)")
_FAILURE_LINE = re.compile(r"^ *\| (?:error: |.*\] +ERROR |(?=[\w.]+(?:Error|Exception): ))(.*)")
"""Pattern for one line of the reason of a failure. Group 1 is the error message of the failed process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """Process of an active run. `restarts` is None if the launcher does not restart the process."""

    title: str
    pid: int
    port: int | None
    restarts: int | None
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """Current status of a run, with None for unknown values.

    `step` counts the trained steps. `reward` is the reward of the last step. `reward_mean` is the mean over
    the last `TREND_STEPS` steps, and `reward_change` is `reward_mean` minus the mean over the `TREND_STEPS`
    steps before. Sizes are in bytes, times in seconds since the epoch. `uploads` has the upload state of the
    checkpoints, and `findings` the reasons why the run does not learn. `seen` is the time of the last report.
    `stale` is True for an active run without a report for `STALE_SECONDS`.
    """

    name: str
    run_id: str
    directory: str
    host: str
    state: RunState
    seen: float
    stale: bool
    reason: str | None
    attempt: int
    step: int
    max_steps: int | None
    reward: float | None
    reward_mean: float | None
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
    uploads: Mapping[str, Any] | None
    last_error: str | None
    findings: list[Any]
    disk_used: int | None
    disk_free: int


def run_status(output_dir: Path, *, measure_disk: bool = True) -> RunStatus:
    """Return the status of a run. Raise `UsageError` if the directory has no record of a run."""
    record = current_record(output_dir)
    state = record.actual_state()
    seen = last_seen(output_dir)
    trained = _trained(output_dir, record)
    newest = trained[-1] if trained else StepMetrics(-1, {})
    rewards = [step.reward for step in trained if step.reward is not None]
    is_active = state in ACTIVE_STATES
    return RunStatus(
        name=output_dir.absolute().name,
        run_id=record.run_id,
        directory=str(output_dir.absolute()),
        host=record.host,
        state=state,
        seen=seen,
        stale=state in ACTIVE_STATES and state != "paused" and time.time() - seen > STALE_SECONDS,
        reason=record.actual_reason(),
        attempt=record.attempt,
        step=max(newest.number + 1, record.start_step),
        max_steps=record.max_steps,
        reward=newest.reward,
        reward_mean=statistics.fmean(rewards[-TREND_STEPS:]) if rewards else None,
        reward_change=_reward_change(rewards),
        tokens_per_second=newest.value("orchestrator/perf/throughput") if is_active else None,
        seconds_left=_seconds_left(record, trained) if is_active else None,
        last_step_time=newest.value("trainer/time"),
        started=record.started,
        ended=record.ended,
        restarts=record.restarts,
        processes=_process_statuses(record),
        waits=waits(record) if state in ("starting", "running") else [],
        checkpoint_step=newest_step(output_dir),
        uploads=_uploads(output_dir),
        last_error=_last_error(output_dir, record),
        findings=findings(trained, output_dir),
        disk_used=size_of(output_dir) if measure_disk else None,
        disk_free=free_bytes(output_dir),
    )


def last_seen(output_dir: Path) -> float:
    """Return the time of the last report of the run's launcher, which reports regularly."""
    away = read_remote_run(output_dir)
    status = output_dir / STATUS_FILE
    if away is not None and (away.job is None or not status.exists()):
        return away.said
    return status.stat().st_mtime


def newest_step(output_dir: Path) -> int | None:
    """Return the step of the checkpoint that a resume would start from, or None."""
    info = find_resume_checkpoint(output_dir)
    return None if info is None else info.step


def _uploads(output_dir: Path) -> Mapping[str, Any] | None:
    try:
        found = read_json(output_dir / UPLOADS_FILE)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def find_checkpoint(output_dir: Path, step: str) -> CheckpointInfo:
    """Return the checkpoint for `best`, `last` or a step.

    Raise `UsageError` for `best` if no checkpoint was evaluated, and `CheckpointError` if the checkpoint does
    not exist.
    """
    return choose_checkpoint(output_dir, step, read_scores(output_dir)).info


def _trained(output_dir: Path, record: RunRecord) -> list[StepMetrics]:
    """Return the trained steps, in order.

    An attempt that resumes from step N replaces all steps after N, even before it has trained a step.
    """
    return [
        step
        for step in read_run_metrics(output_dir / "metrics.jsonl").steps()
        if step.trained is not None and (step.number < record.start_step or _is_new(step.trained, record))
    ]


def _is_new(trained: Record, record: RunRecord) -> bool:
    """Return True if the newest attempt wrote the record. Its time is not used, because clocks may change."""
    return bool(trained.get("attempt", record.attempt) == record.attempt)


def _reward_change(rewards: Sequence[float]) -> float | None:
    if len(rewards) < 2 * TREND_STEPS:
        return None
    before, last = rewards[-2 * TREND_STEPS : -TREND_STEPS], rewards[-TREND_STEPS:]
    return statistics.fmean(last) - statistics.fmean(before)


def _seconds_left(record: RunRecord, trained: Sequence[StepMetrics]) -> float | None:
    """Return the seconds left, at the pace of the last steps of this attempt."""
    new = [step for step in trained if step.trained is not None and _is_new(step.trained, record)]
    times = [at for step in new[-_PACE_STEPS:] if (at := step.value("trainer/time")) is not None]
    if record.max_steps is None or len(times) < 2:
        return None
    per_step = statistics.median(later - earlier for earlier, later in pairwise(times))  # robust to pauses
    steps = record.max_steps - trained[-1].number - 1
    return max(0.0, per_step * steps - max(0.0, time.time() - times[-1]))


def _process_statuses(record: RunRecord) -> list[ProcessStatus]:
    statuses = []
    for known in record.processes:
        statuses.append(_process_status(known, record))
        if known.title == "orchestrator" and not record.elsewhere:
            statuses += _rollout_workers(known.process())
    return statuses


def _rollout_workers(orchestrator: psutil.Process | None) -> list[ProcessStatus]:
    """Return the rollout workers, by index. They are children of the orchestrator, which restarts them."""
    workers: list[tuple[int, int]] = []
    with suppress(psutil.Error):
        for child in orchestrator.children() if orchestrator is not None else ():
            with suppress(psutil.Error):  # the child has just ended
                argv = child.cmdline()
                if _ROLLOUT_WORKER in argv:
                    workers.append((int(argv[-1]), child.pid))
    return [
        ProcessStatus(title=f"rollouts {index}", pid=pid, port=None, restarts=None, state="ready")
        for index, pid in sorted(workers)
    ]


def _process_status(known: ProcessRecord, record: RunRecord) -> ProcessStatus:
    if record.elsewhere:
        state = "unknown: on another machine"
    elif known.node == 0 and known.process() is None:
        state = "gone"
    else:
        state = "ready" if known.ready else "starting"
    return ProcessStatus(
        title=known.title, pid=known.pid, port=known.port, restarts=known.restarts, state=state
    )


def _last_error(output_dir: Path, record: RunRecord) -> str | None:
    """Return the error message of the process that ended the run, else the newest error in the log."""
    if record.state == "failed" and record.reason and (message := _failure_line(record.reason)):
        return message
    for line in reversed(last_lines(run_log(output_dir), 500)):
        if match := _ERROR_LINE.search(line):
            return match[1]
    return None


def failure_message(reason: str) -> str:
    """Return the error of the failed process in a run's reason of failure, else the first line."""
    return _failure_line(reason) or reason.partition("\n")[0]


def _failure_line(reason: str) -> str | None:
    matches = map(_FAILURE_LINE.search, reversed(reason.splitlines()))
    return next((match[1] for match in matches if match), None)
