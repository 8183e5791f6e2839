"""Endpoints of the API for one run: `/api/runs/RUN/NAME`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from buckeye.errors import BuckeyeError, UsageError
from buckeye.run_files.known_runs import current_record
from buckeye.run_files.record import ACTIVE_STATES, RunRecord
from buckeye.ui import charts, records, rollouts
from buckeye.ui.findings import findings_of
from buckeye.ui.run_catalog import OpenRun
from buckeye.ui.timeline import TimelineStep, timeline
from buckeye.ui.tokens import tokens


class NoParameters(msgspec.Struct, forbid_unknown_fields=True):
    """Empty set of parameters."""


class MetricSelection(msgspec.Struct, forbid_unknown_fields=True):
    """Selection of metrics: a regular expression for their names, and their maximum number."""

    pattern: str
    most: int = 80


def call_endpoint(run: OpenRun, name: str, given: Mapping[str, str]) -> Any:
    """Return the answer of the endpoint `name` for a run, as JSON values.

    Raise `UsageError` for an unknown endpoint or invalid parameters.
    """
    if name not in ENDPOINTS:
        raise UsageError(
            f"no endpoint is named {name!r}",
            code="BK-CLI-UNKNOWN",
            hint=f"known endpoints: {', '.join(ENDPOINTS)}",
        )
    kind, function = ENDPOINTS[name]
    try:
        parameters = msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {error}", code="BK-CLI-ARGUMENT") from None
    return function(run, parameters)


def summary(run: OpenRun) -> dict[str, Any]:
    """Return the entry of a run in the list of runs."""
    record, steps = _record(run), run.steps
    trained = [step for step in steps if step.trained is not None]
    newest = trained[-1] if trained else None
    return {
        "name": run.name,
        "directory": str(run.path),
        "state": "unknown" if record is None else record.actual_state(),
        "step": 0 if newest is None else newest.number + 1,
        "max_steps": None if record is None else record.max_steps,
        "started": _started(record, run),
        "ended": None if record is None else record.ended,
        "reward": None if newest is None else newest.reward,
        "curve": charts.sparkline(steps),
    }


def status(run: OpenRun) -> dict[str, Any]:
    """Return the current status of a run. If it has no record, return only what its metrics show."""
    from buckeye.launch.waits import describe_wait  # slow import: about a second
    from buckeye.runs.status import run_status

    known = {**summary(run), "now": time.time(), "stamp": run.stamp()}
    try:
        seen = run_status(run.path, measure_disk=False)
    except BuckeyeError as error:
        return {**known, "going_on": False, "reason": str(error)}
    answer = {**dataclasses.asdict(seen), **known, "going_on": seen.state in ACTIVE_STATES}
    answer["waits"] = [describe_wait(wait, known["now"]) for wait in seen.waits]
    del answer["findings"]  # the endpoint `findings` returns all of them
    return answer


def _record(run: OpenRun) -> RunRecord | None:
    try:
        return current_record(run.path)
    except BuckeyeError:
        return None


def _started(record: RunRecord | None, run: OpenRun) -> float | None:
    if record is not None:
        return record.started
    path = run.path / "metrics.jsonl"
    return path.stat().st_mtime if path.exists() else None


ENDPOINTS: Mapping[str, tuple[type[msgspec.Struct], Callable[[OpenRun, Any], Any]]] = {
    "status": (NoParameters, lambda run, _: status(run)),
    "findings": (NoParameters, lambda run, _: findings_of(run)),
    "overview": (NoParameters, lambda run, _: charts.overview(run)),
    "intervals": (NoParameters, lambda run, _: charts.reward_intervals(run)),
    "metrics": (MetricSelection, lambda run, asked: charts.matching_metrics(run, asked.pattern, asked.most)),
    "groups": (NoParameters, lambda run, _: rollouts.groups(run)),
    "group": (rollouts.GroupAddress, rollouts.group),
    "rollout": (rollouts.RolloutAddress, rollouts.rollout),
    "search": (rollouts.RolloutSearch, rollouts.search),
    "tokens": (rollouts.RolloutAddress, tokens),
    "logs": (records.LogSelection, records.logs),
    "events": (NoParameters, lambda run, _: records.events(run)),
    "timeline": (TimelineStep, timeline),
    "settings": (NoParameters, lambda run, _: records.settings(run)),
}
"""Endpoints by name: the type of the parameters, and the function that returns the answer."""
