"""What is asked of one run, by name: `/api/runs/RUN/NAME` answers with it, and an export holds it."""

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
from buckeye_ui import figures, played, records
from buckeye_ui.findings import findings_of
from buckeye_ui.forecast import forecast
from buckeye_ui.notes import notes
from buckeye_ui.sources import OpenRun
from buckeye_ui.timeline import Chosen, timeline
from buckeye_ui.tokens import tokens


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters."""


class Pattern(msgspec.Struct, forbid_unknown_fields=True):
    """Which numbers: a regular expression of their names, and how many at most."""

    pattern: str
    most: int = 80


@dataclass(frozen=True, slots=True)
class Answer:
    """How a question is answered: `what` it is in a sentence, its `parameters`, and who answers."""

    what: str
    parameters: type[msgspec.Struct]
    give: Callable[[OpenRun, Any], Any]


def answer(run: OpenRun, name: str, given: Mapping[str, str]) -> Any:
    """What the question `name` about a run is answered with: a value of JSON. Raises UsageError for a
    question or parameters that there are not."""
    known = ANSWERS.get(name)
    if known is None:
        raise UsageError(f"Nobody can answer {name!r} of a run. There are: {', '.join(ANSWERS)}.")
    try:
        parameters = msgspec.convert(dict(given), known.parameters, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {error}") from None
    return known.give(run, parameters)


def summary(run: OpenRun) -> dict[str, Any]:
    """A run in a line of the list."""
    record, steps = _record(run), run.steps
    trained = [step for step in steps if step.trained is not None or run.foreign is not None]
    newest = trained[-1] if trained else None
    return {
        "name": run.name,
        "directory": str(run.place),
        "state": _state(record, run),
        "step": 0 if newest is None else newest.number + 1,
        "max_steps": None if record is None else record.max_steps,
        "started": _started(record, run),
        "ended": None if record is None else record.ended,
        "reward": None if newest is None else newest.reward,
        "curve": figures.sparkline(steps),
        "tags": _tags(run),
    }


def status(run: OpenRun) -> dict[str, Any]:
    """How a run is now. Of a directory without a record it is what the numbers tell."""
    from buckeye.launch.waits import sentence  # settings are behind them, which take most of a second
    from buckeye.runs.status import run_status

    known = {**summary(run), "now": time.time(), "stamp": run.stamp()}
    if run.foreign is not None:
        reason = _OF_OTHERS.format(kind=run.foreign.kind)
        note = "; ".join([reason, *run.foreign.unreadable])
        return {**known, "going_on": False, "reason": None, "note": note}
    try:
        seen = run_status(run.path, measure_disk=False)
    except BuckeyeError as error:
        return {**known, "going_on": False, "reason": str(error)}
    told = {**dataclasses.asdict(seen), **known, "going_on": seen.state in GOING_ON}
    told["waits"] = [sentence(wait, known["now"]) for wait in seen.waits]
    del told["findings"]  # `findings` has all of them
    return told


_OF_OTHERS = (
    "Results of {kind}: what was played is shown. What a trainer measures, settings, logs and tokens are "
    "not in such a folder"
)


def _state(record: RunRecord | None, run: OpenRun) -> str:
    if run.foreign is not None:
        return f"of {run.foreign.kind}"
    return "unknown" if record is None else record.actual_state()


def _tags(run: OpenRun) -> list[str]:
    try:
        return [tag for one in notes(run)["notes"] if one["of"] == "" for tag in one["tags"]]
    except BuckeyeError:  # `notes` says what is wrong
        return []


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
    "status": Answer(
        "state, progress, processes, and who waits for whom", Nothing, lambda run, _: status(run)
    ),
    "findings": Answer(
        "what is wrong with it and why, as `rl diagnose` says", Nothing, lambda run, _: findings_of(run)
    ),
    "overview": Answer(
        "the charts that matter, and evaluations", Nothing, lambda run, _: figures.overview(run)
    ),
    "intervals": Answer(
        "the 95 % interval of each batch's reward", Nothing, lambda run, _: figures.reward_intervals(run)
    ),
    "forecast": Answer(
        "what it should take by the plan before it, and what it has taken",
        Nothing,
        lambda run, _: forecast(run),
    ),
    "metrics": Answer(
        "all numbers whose names match a regular expression",
        Pattern,
        lambda run, asked: figures.matching(run, asked.pattern, asked.most),
    ),
    "groups": Answer(
        "all groups of rollouts, a column for each figure", Nothing, lambda run, _: played.groups(run)
    ),
    "group": Answer("the answers of a group side by side, and what each earned", played.Group, played.group),
    "rollout": Answer("one rollout with its conversation", played.Rollout, played.rollout),
    "search": Answer("the rollouts of a step that have a text", played.Search, played.search),
    "tokens": Answer("a rollout token by token, where the batch was kept", played.Rollout, tokens),
    "logs": Answer("what its processes printed, newest lines last", records.Logs, records.logs),
    "events": Answer("what happened to it", Nothing, lambda run, _: records.events(run)),
    "timeline": Answer("what went on when, and the rollouts of a step", Chosen, timeline),
    "notes": Answer("tags and notes of people", Nothing, lambda run, _: notes(run)),
    "settings": Answer("its settings", Nothing, lambda run, _: records.settings(run)),
}
