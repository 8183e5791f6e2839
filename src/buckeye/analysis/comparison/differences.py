"""What is different about two runs: settings, versions, machines, tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from buckeye.base.storage import read_json, step_directory
from buckeye.errors import UsageError
from buckeye.launch.changed_settings import settings_apart
from buckeye.run_files.events import read_events
from buckeye.run_files.record import read_record
from buckeye.runs import Run

_OF_VERSIONS = ("buckeye", "torch")
_OF_MACHINES = ("device", "threads", "ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Something that `a` has otherwise than `b`; None is not there, or not recorded."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """The tasks that two runs have played in training (`train`) or evaluation (`eval`): how many each, how
    many both with the same prompt, and how many of the same name with another prompt."""

    split: str
    a: int
    b: int
    shared: int
    changed: int


def different_settings(a: Run, b: Run) -> list[Difference]:
    """The settings that differ. What several processes share is named once."""
    seen, found = set[tuple[str, str, str]](), list[Difference]()
    for key, this, other in settings_apart(a.settings, b.settings):
        what = (key.partition(".")[2], repr(this), repr(other))
        if what not in seen:
            seen.add(what)
            found.append(Difference(name=key, a=this, b=other))
    return found


def different_versions(a: Run, b: Run) -> list[Difference]:
    """Of Buckeye's code and of libraries, as they were when each was started last."""
    return _apart(_versions(a), _versions(b))


def different_machines(a: Run, b: Run) -> list[Difference]:
    """Host, system, cores, and what the trainer computed on."""
    return _apart(_machine(a), _machine(b))


def _apart(these: Mapping[str, Any], others: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(name=name, a=these.get(name), b=others.get(name))
        for name in dict.fromkeys([*these, *others])
        if these.get(name) != others.get(name)
    ]


def _started(run: Run, what: str) -> dict[str, Any]:
    """What the newest start says of itself."""
    said = [event.get(what) for event in read_events(run.path) if event["event"] == "start"]
    return dict(said[-1]) if said and isinstance(said[-1], dict) else {}


def _trainer(run: Run) -> dict[str, Any]:
    """What the newest batch that was kept says of the trainer."""
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


def compared_tasks(a: Run, b: Run) -> list[Tasks]:
    """The tasks that each has played, whatever their environments are called."""
    these, others = _tasks(a), _tasks(b)
    return [
        Tasks(
            split=split,
            a=len(in_a := these[split]),
            b=len(in_b := others[split]),
            shared=sum(in_b.get(task) == prompt for task, prompt in in_a.items()),
            changed=sum(in_b[task] != prompt for task, prompt in in_a.items() if task in in_b),
        )
        for split in dict.fromkeys([*these, *others])
    ]


def _tasks(run: Run) -> defaultdict[str, dict[str, int]]:
    """Split -> task -> the hash of its prompt."""
    found = defaultdict[str, dict[str, int]](dict)
    for split, task, prompt in run.query(
        "SELECT split, task, max(prompt) FROM rollouts WHERE retried = 0 GROUP BY split, env, task "
        "ORDER BY split DESC"
    ):
        found[split][task] = prompt
    return found
