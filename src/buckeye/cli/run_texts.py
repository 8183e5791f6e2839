"""Format the output of commands on runs as aligned plain text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from buckeye.base.columns import align_columns, quoted
from buckeye.base.disk import human_bytes
from buckeye.base.json_lines import printable
from buckeye.launch.progress import human_duration
from buckeye.launch.waits import describe_wait
from buckeye.runs.clean import FILE_KINDS, KIND_DESCRIPTIONS, Deletable
from buckeye.runs.status import TREND_STEPS, ProcessStatus, RunStatus


def run_list(runs: Iterable[RunStatus]) -> str:
    """Return a table with one line per run."""
    rows = [("name", "id", "state", "step", "reward", "started", "directory")]
    for run in runs:
        rows.append(
            (
                run.name,
                run.run_id,
                _short_state(run),
                _step(run),
                _reward(run),
                _date(run.started),
                run.directory,
            )
        )
    return align_columns(rows)


def status_text(run: RunStatus, now: float) -> str:
    """Return the status of a run as text; unknown values have no line."""
    rows = [
        ("run", f"{run.name} ({run.run_id}), attempt {run.attempt}"),
        ("state", _state(run, now)),
        ("step", _step(run)),
        ("reward", _reward_and_trend(run)),
        ("tokens/s", f"{run.tokens_per_second:,.0f}" if run.tokens_per_second is not None else ""),
        ("time left", human_duration(run.seconds_left) if run.seconds_left is not None else ""),
        ("last step", f"{_ago(run.last_step_time, now)}" if run.last_step_time is not None else ""),
        ("checkpoint", f"step {run.checkpoint_step}" if run.checkpoint_step is not None else "none yet"),
        ("uploads", str(run.uploads.get("text", "")) if run.uploads else ""),
        ("restarts", str(run.restarts)),
        ("disk", _disk(run)),
        ("last error", run.last_error or ""),
        *(("warning", str(finding)) for finding in run.findings),
        ("directory", run.directory),
    ]
    lines = [align_columns([row for row in rows if row[1]])]
    if run.waits:
        lines.append("\n" + "\n".join(describe_wait(wait, now) for wait in run.waits))
    if run.processes:
        lines.append("\n" + _process_table(run.processes))
    return "\n".join(lines)


def event_line(event: Mapping[str, Any]) -> str:
    """Return an event as text: `2026-01-31 12:00:00  attempt 1  checkpoint  step 10`."""
    details = {k: v for k, v in event.items() if k not in ("time", "event", "attempt") and v is not None}
    text = printable(
        " ".join(f"{name} {str(value).partition(chr(10))[0]}" for name, value in details.items())
    )
    return f"{_date(event['time'])}  attempt {event['attempt']}  {event['event']:<10}  {text}".rstrip()


def cleaning_table(items: Sequence[Deletable]) -> str:
    """Return the kinds of deletable files, with counts, sizes and the total."""
    rows = [("kind", "number", "size", "description")]
    for kind in FILE_KINDS:
        of_kind = [item for item in items if item.kind == kind]
        if of_kind:
            size = human_bytes(sum(item.size for item in of_kind))
            rows.append((kind, str(len(of_kind)), size, KIND_DESCRIPTIONS[kind]))
    rows.append(("all", str(len(items)), human_bytes(sum(item.size for item in items)), ""))
    return align_columns(rows)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _ago(seconds: float, now: float) -> str:
    return f"{human_duration(max(0.0, now - seconds))} ago"


def _disk(run: RunStatus) -> str:
    return f"{human_bytes(run.disk_used)} used, {human_bytes(run.disk_free)} free"


def _step(run: RunStatus) -> str:
    return f"{run.step} of {run.max_steps}" if run.max_steps is not None else str(run.step)


def _reward(run: RunStatus) -> str:
    return f"{run.reward:.4f}" if run.reward is not None else "-"


def _reward_and_trend(run: RunStatus) -> str:
    if run.reward_mean is None:
        return ""
    mean = f"mean of the last {TREND_STEPS} steps" if run.step > TREND_STEPS else "mean of all steps"
    change = "" if run.reward_change is None else f", {run.reward_change:+.4f} from the {TREND_STEPS} before"
    return f"{_reward(run)} ({mean}: {run.reward_mean:.4f}{change})"


def _state(run: RunStatus, now: float) -> str:
    if run.state == "dead":
        return f"dead: {run.reason}; to resume: buckeye rl resume {quoted(run.directory)}"
    if run.state == "paused":
        text = "paused: its launcher is suspended (`kill -CONT` continues it)"
    elif run.ended is not None:
        text = f"{run.state} {_ago(run.ended, now)}"
    elif run.stale:
        text = f"stale: last status {run.state}, on {run.host}, {_ago(run.seen, now)}"
    else:
        duration = human_duration(max(0.0, now - run.started))
        text = f"{run.state} for {duration}, on {run.host}, seen {_ago(run.seen, now)}"
    reason = run.reason.splitlines()[0] if run.reason else ""
    return f"{text}: {reason}" if reason else text


def _short_state(run: RunStatus) -> str:
    return f"stale ({run.state})" if run.stale else run.state


def _process_table(processes: Sequence[ProcessStatus]) -> str:
    rows = [("process", "pid", "port", "restarts", "state")]
    for process in processes:
        port, restarts = (
            "-" if number is None else str(number) for number in (process.port, process.restarts)
        )
        rows.append((process.title, str(process.pid), port, restarts, process.state))
    return align_columns(rows)
