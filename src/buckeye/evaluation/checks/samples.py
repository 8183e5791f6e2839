"""Read tasks of each split in a seeded order, and choose tasks of every family."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.envs.base import TRAIN, Environment, Probe, Task, required_tasks
from buckeye.errors import THIRD_PARTY_ERRORS, UsageError

EVERY_FAMILY = "all"
"""Family of tasks without a family in their data."""

MAX_SCANNED = 20_000
"""Maximum number of tasks read from one split; a lazy split may be endless."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSample:
    """Sample of one split.

    `scanned` has tasks in a seeded order. `families` has, by family, some tasks with distinct ids.
    """

    name: str
    size: int
    scanned: Sequence[Task]
    families: Mapping[str, Sequence[Task]]

    @property
    def is_train(self) -> bool:
        return self.name == TRAIN

    @property
    def extent(self) -> str:
        """Scanned part of the split, as text."""
        whole = len(self.scanned) == self.size
        return f"{self.size:,}" if whole else f"{len(self.scanned):,} of {self.size:,}"


def family_of(task: Task) -> str:
    """Return `data["family"]`, or `EVERY_FAMILY`."""
    return str(task.data.get("family", EVERY_FAMILY))


def probes_of(environment: Environment) -> Sequence[Probe]:
    """Return the probes of the environment, if it has a method `probes`. Raise `UsageError` if it fails."""
    probes = getattr(environment, "probes", None)
    if probes is None:
        return ()
    try:
        return tuple(probes())
    except THIRD_PARTY_ERRORS as error:  # third-party code
        raise UsageError(
            f"probes() of environment {environment.name} failed: {type(error).__name__}: {error}",
            code="BK-ENV-FAILED",
        ) from error


def read_probes(environment: Environment, path: Path | None) -> list[Probe]:
    """Return the probes in a file of `buckeye env attack --out FILE`. Raise `UsageError` if it is invalid."""
    if path is None:
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["probes"]
        by_id = {
            (split, task.id): task
            for split in {row["split"] for row in rows}
            for task in required_tasks(environment, split)
        }
        return [
            Probe(
                name=str(row["name"]),
                task=by_id[row["split"], row["task"]],
                reply=str(row["reply"]),
                low=float(row["low"]),
                high=float(row["high"]),
            )
            for row in rows
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"cannot read the probes of {path}: {type(error).__name__}: {error}",
            code="BK-CLI-ARGUMENT",
            hint="write it with `buckeye env attack --out FILE`, for the same environment and arguments",
        ) from error


def sample_splits(
    environment: Environment, names: Sequence[str], *, per_family: int, seed: int
) -> list[SplitSample]:
    """Return a sample of each split. Raise `UsageError` if a split cannot be read or is empty."""
    return [_sample(environment, name, per_family, seed) for name in names]


def scan_order(name: str, size: int, seed: int) -> list[int]:
    """Return the indices of the tasks to read, in seeded random order: at most `MAX_SCANNED`."""
    return random.Random(f"{seed}/{name}").sample(range(size), min(size, MAX_SCANNED))  # noqa: S311  not for security


def _sample(environment: Environment, name: str, per_family: int, seed: int) -> SplitSample:
    tasks = required_tasks(environment, name)
    scanned = [tasks[index] for index in scan_order(name, len(tasks), seed)]
    families: dict[str, dict[str, Task]] = defaultdict(dict)
    for task in scanned:
        chosen = families[family_of(task)]
        if len(chosen) < per_family:
            chosen.setdefault(task.id, task)
    return SplitSample(
        name=name,
        size=len(tasks),
        scanned=scanned,
        families={family: tuple(families[family].values()) for family in sorted(families)},
    )


def groups_of(samples: Sequence[SplitSample]) -> Iterator[tuple[str, str, Sequence[Task]]]:
    """Yield (split, family, sampled tasks) of every split."""
    for sample in samples:
        for family, tasks in sample.families.items():
            yield sample.name, family, tasks
