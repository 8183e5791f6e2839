"""Timeline of a run: one lane per process, engine or environment, with time spans from the records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from buckeye.base.json_lines import read_json_lines
from buckeye.monitor.metrics import Record, StepMetrics
from buckeye.monitor.rollouts import ROLLOUTS_FOLDER, rollouts_file
from buckeye.run_files.events import read_events
from buckeye.ui.run_catalog import OpenRun

_PARTS: Mapping[str, Sequence[str]] = {
    "trainer": ("wait", "compute", "publish", "checkpoint"),
    "sft": ("wait", "compute", "publish", "checkpoint"),
    "orchestrator": ("wait_for_weights", "wait_for_rollouts", "evaluate", "write_batch"),
}
_NOT_MARKED = {"process", "ready", "fork", "tune"}
_MOST_ROLLOUTS = 4_000
_MOST_MARKS = 20_000

Span = tuple[float, float, str, int, str]
"""Begin and end in seconds since the epoch, kind, step, and a label."""


class TimelineStep(msgspec.Struct, forbid_unknown_fields=True):
    """Step whose rollouts the timeline shows; None shows no rollouts."""

    step: int | None = None


def timeline(run: OpenRun, asked: TimelineStep) -> dict[str, Any]:
    """Return `lanes` with their spans, and `marks` for events without a duration.

    A process records only the durations of the parts of a step. So the parts are shown in their usual order.
    """
    steps = run.steps
    lanes = {
        **{process: list(_parts(steps, process)) for process in _PARTS},
        "evaluation": list(_evaluations(steps)),
        **_engines(steps),
        **({} if asked.step is None else _rollouts(run, asked.step)),
    }
    marks = [
        {name: event.get(name) for name in ("time", "event", "attempt", "process", "step", "cause")}
        for event in read_events(run.path)
        if event.get("event") not in _NOT_MARKED
    ]
    return {
        "lanes": [{"name": name, "spans": spans} for name, spans in lanes.items() if spans],
        "marks": marks[-_MOST_MARKS:],
    }


def _parts(steps: Sequence[StepMetrics], process: str) -> Iterator[Span]:
    for step in steps:
        record = step.records.get(process)
        if record is None or (end := _number(record, "time")) is None:
            continue
        seconds = {part: _number(record, f"time/{part}") or 0.0 for part in _PARTS[process]}
        whole = _number(record, "time/total") or sum(seconds.values())
        at = end - whole
        for part, took in seconds.items():
            took = min(took, end - at)
            if took > 0:
                yield (at, at + took, part, step.number, "")
                at += took
        if end - at > 1e-3:
            yield (at, end, "other", step.number, "")


def _evaluations(steps: Sequence[StepMetrics]) -> Iterator[Span]:
    for step in steps:
        record = step.records.get("eval", {})
        end = _number(record, "time")
        for name in record:
            took = _number(record, name) if name.startswith("eval/") and name.endswith("/time") else None
            if end is not None and took is not None:
                yield (end - took, end, "evaluation", step.number, name.split("/")[1])


def _engines(steps: Sequence[StepMetrics]) -> dict[str, list[Span]]:
    """Return the weight versions of each engine as spans, as the orchestrator recorded them."""
    lanes: dict[str, list[Span]] = {}
    before: float | None = None
    for step in steps:
        record = step.records.get("orchestrator", {})
        now = _number(record, "time")
        for name in record:
            if not (name.startswith("inference/") and name.endswith("/weight_version")) or now is None:
                continue
            version, lane = _number(record, name), lanes.setdefault(f"engine {name.split('/')[1]}", [])
            label = f"version {version:g}" if version is not None else "no version"
            begin = before if before is not None else now - (_number(record, "time/total") or 0.0)
            if lane and lane[-1][4] == label:
                lane[-1] = (lane[-1][0], now, *lane[-1][2:])
            else:
                lane.append((begin, now, "version", step.number, label))
        before = now if now is not None else before
    return lanes


def _rollouts(run: OpenRun, step: int) -> dict[str, list[Span]]:
    """Return the rollouts of a step by environment, including those of dropped groups.

    Rollouts without recorded times are left out.
    """
    lanes: dict[str, list[Span]] = {}
    for dropped in (False, True):
        path = run.path / ROLLOUTS_FOLDER / rollouts_file(step, dropped=dropped)
        for line in read_json_lines(path):
            end, took, group = _number(line, "ended"), _number(line, "seconds"), line.get("group")
            lane = lanes.setdefault(f"rollouts of {line.get('env')}", [])
            if end is None or took is None or len(lane) >= _MOST_ROLLOUTS:
                continue
            kind = "dropped" if dropped else "failed" if line.get("reward") is None else "rollout"
            lane.append((end - took, end, kind, step, f"group {group}, reward {line.get('reward')}"))
    return {name: sorted(spans) for name, spans in lanes.items()}


def _number(record: Record, name: str) -> float | None:
    found = record.get(name)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
