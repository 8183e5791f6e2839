"""API answers about one run: `/api/runs/RUN/NAME` returns one, and a report contains all of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from buckeye.errors import BuckeyeError, UsageError
from buckeye.run_files.known_runs import record_now
from buckeye.run_files.record import GOING_ON, RunRecord
from buckeye.ui import figures, played, records
from buckeye.ui.findings import findings_of
from buckeye.ui.sources import OpenRun
from buckeye.ui.timeline import Chosen, timeline
from buckeye.ui.tokens import tokens


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """Empty set of parameters."""


class Pattern(msgspec.Struct, forbid_unknown_fields=True):
    """Selection of metrics: a regular expression for their names, and their maximum number."""

    pattern: str
    most: int = 80


@dataclass(frozen=True, slots=True)
class Answer:
    """Handler of a question: the type of its `parameters`, and the function that answers."""

    parameters: type[msgspec.Struct]
    give: Callable[[OpenRun, Any], Any]


def answer(run: OpenRun, name: str, given: Mapping[str, str]) -> Any:
    """Return the answer to the question `name` about a run, as JSON values.

    Raise `UsageError` for an unknown question or invalid parameters.
    """
    known = ANSWERS.get(name)
    if known is None:
        raise UsageError(f"Nobody can answer {name!r} of a run. There are: {', '.join(ANSWERS)}.")
    try:
        parameters = msgspec.convert(dict(given), known.parameters, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {error}") from None
    return known.give(run, parameters)


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
        "curve": figures.sparkline(steps),
    }


def status(run: OpenRun) -> dict[str, Any]:
    """Return the current status of a run; without a record, only the part known from metrics."""
    from buckeye.launch.waits import sentence  # slow: it imports the settings, most of a second
    from buckeye.runs.status import run_status

    known = {**summary(run), "now": time.time(), "stamp": run.stamp()}
    try:
        seen = run_status(run.path, measure_disk=False)
    except BuckeyeError as error:
        return {**known, "going_on": False, "reason": str(error)}
    told = {**dataclasses.asdict(seen), **known, "going_on": seen.state in GOING_ON}
    told["waits"] = [sentence(wait, known["now"]) for wait in seen.waits]
    del told["findings"]  # the question `findings` returns all of them
    return told


def _record(run: OpenRun) -> RunRecord | None:
    try:
        return record_now(run.path)
    except BuckeyeError:
        return None


def _started(record: RunRecord | None, run: OpenRun) -> float | None:
    if record is not None:
        return record.started
    path = run.path / "metrics.jsonl"
    return path.stat().st_mtime if path.exists() else None


ANSWERS: Mapping[str, Answer] = {
    "status": Answer(Nothing, lambda run, _: status(run)),
    "findings": Answer(Nothing, lambda run, _: findings_of(run)),
    "overview": Answer(Nothing, lambda run, _: figures.overview(run)),
    "intervals": Answer(Nothing, lambda run, _: figures.reward_intervals(run)),
    "metrics": Answer(Pattern, lambda run, asked: figures.matching(run, asked.pattern, asked.most)),
    "groups": Answer(Nothing, lambda run, _: played.groups(run)),
    "group": Answer(played.Group, played.group),
    "rollout": Answer(played.Rollout, played.rollout),
    "search": Answer(played.Search, played.search),
    "tokens": Answer(played.Rollout, tokens),
    "logs": Answer(records.Logs, records.logs),
    "events": Answer(Nothing, lambda run, _: records.events(run)),
    "timeline": Answer(Chosen, timeline),
    "settings": Answer(Nothing, lambda run, _: records.settings(run)),
}
