"""Find the differences of two runs in settings, versions, machines and tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from buckeye.base.storage import read_json, step_directory
from buckeye.errors import UsageError
from buckeye.launch.changed_settings import compare_settings, distinct_changes
from buckeye.run_files.events import read_events
from buckeye.run_files.record import read_record
from buckeye.runs import Run

_OF_VERSIONS = ("buckeye", "torch")
_OF_MACHINES = ("device", "threads", "ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDifference:
    """Difference in one value between runs `a` and `b`. None: the run does not have or record it."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCounts:
    """Tasks of two runs in training (`train`) or evaluation (`eval`).

    `a` and `b` count the tasks of each run, `shared` the tasks with equal prompts in both, and `changed` the
    tasks with equal ids and different prompts.
    """

    split: str
    a: int
    b: int
    shared: int
    changed: int


def different_settings(a: Run, b: Run) -> list[RunDifference]:
    """Return the settings that differ. A setting shared by several processes appears once."""
    differences = distinct_changes(compare_settings(a.settings, b.settings))
    return [RunDifference(name=key, a=this, b=other) for key, this, other in differences]


def different_versions(a: Run, b: Run) -> list[RunDifference]:
    """Return the versions of Buckeye and of libraries that differ between the last starts of the runs."""
    return _apart(_versions(a), _versions(b))


def different_machines(a: Run, b: Run) -> list[RunDifference]:
    """Return the differences in host, system, cores and the trainer's device."""
    return _apart(_machine(a), _machine(b))


def _apart(these: Mapping[str, Any], others: Mapping[str, Any]) -> list[RunDifference]:
    return [
        RunDifference(name=name, a=these.get(name), b=others.get(name))
        for name in dict.fromkeys([*these, *others])
        if these.get(name) != others.get(name)
    ]


def _started(run: Run, what: str) -> dict[str, Any]:
    """Return the field `what` of the newest start event, or {} if the event lacks it."""
    said = [event.get(what) for event in read_events(run.path) if event["event"] == "start"]
    return dict(said[-1]) if said and isinstance(said[-1], dict) else {}


def _trainer(run: Run) -> dict[str, Any]:
    """Return the record of the newest batch that the run kept, or {} without one."""
    for step in reversed(run.kept_steps):
        with suppress(OSError, ValueError):
            found = read_json(step_directory(run.path / "trained", step) / "record.json")
            return found if isinstance(found, dict) else {}
    return {}


def _versions(run: Run) -> dict[str, Any]:
    trainer = _trainer(run)
    of_trainer = {name: trainer[name] for name in _OF_VERSIONS if name in trainer}
    return _started(run, "versions") or of_trainer


def _machine(run: Run) -> dict[str, Any]:
    trainer, found = _trainer(run), _started(run, "machine")
    with suppress(UsageError):
        found["host"] = read_record(run.path).host
    return found | {name: trainer[name] for name in _OF_MACHINES if name in trainer}


def compare_tasks(a: Run, b: Run) -> list[TaskCounts]:
    """Return the task counts of both runs by split. Environment names are ignored."""
    these, others = _tasks(a), _tasks(b)
    return [
        TaskCounts(
            split=split,
            a=len(in_a := these[split]),
            b=len(in_b := others[split]),
            shared=sum(in_b.get(task) == prompt for task, prompt in in_a.items()),
            changed=sum(in_b[task] != prompt for task, prompt in in_a.items() if task in in_b),
        )
        for split in dict.fromkeys([*these, *others])
    ]


def _tasks(run: Run) -> defaultdict[str, dict[str, int]]:
    """Return the hash of each task's prompt, by split and task id."""
    found = defaultdict[str, dict[str, int]](dict)
    for split, task, prompt in run.query(
        "SELECT split, task, max(prompt) FROM rollouts WHERE retried = 0 GROUP BY split, env, task "
        "ORDER BY split DESC"
    ):
        found[split][task] = prompt
    return found
