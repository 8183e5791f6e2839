"""List the waits of processes for other processes, from the heartbeats in the record of a run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from buckeye.launch.progress import human_duration
from buckeye.run_files.record import RunRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """The process `who` waits for `what` from the process `source`, since the time `since` in seconds.

    If the process works and does not wait, `source` is None and `what` is its work.
    """

    who: str
    source: str | None
    what: str
    since: float


def waits(record: RunRecord) -> list[Wait]:
    """Return the waits of a recorded run, with times since the epoch.

    If all processes of a kind wait for the same thing, they appear as one wait.
    """
    by_kind: dict[str, list[Wait]] = defaultdict(list)
    for process in record.processes:
        since = process.since or process.started
        wait = Wait(who=process.title, source=process.on, what=process.doing, since=since)
        by_kind[process.title.partition(" ")[0]].append(wait)
    merged = []
    for kind, members in by_kind.items():
        if len({(wait.what, wait.source) for wait in members}) == 1:
            first = members[0]
            since = min(wait.since for wait in members)
            merged.append(Wait(who=kind, source=first.source, what=first.what, since=since))
        else:
            merged += members
    return merged


def describe_wait(wait: Wait, now: float) -> str:
    """Return a wait as text, such as `trainer waits for batch 12 from orchestrator (for 35 s)`."""
    duration = human_duration(max(0.0, now - wait.since))
    if wait.source is None:
        return f"{wait.who}: {wait.what} (for {duration})"
    return f"{wait.who} waits for {wait.what} from {wait.source} (for {duration})"
