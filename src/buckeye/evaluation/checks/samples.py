"""Reading the splits of any environment: a seeded scan, and a sample of every family."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from buckeye.envs.base import TRAIN, Environment, Probe, Task
from buckeye.errors import FOREIGN_ERRORS, BuckeyeError, UsageError

EVERY_FAMILY = "all"
"""The family of tasks that name none."""

MOST_SCANNED = 20_000
"""Tasks read of one split; a lazy split may have no end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSample:
    """`scanned` is in seeded order. `families` holds distinct tasks, by id, so many of each at most."""

    name: str
    size: int
    scanned: Sequence[Task]
    families: Mapping[str, Sequence[Task]]

    @property
    def is_train(self) -> bool:
        return self.name == TRAIN

    @property
    def extent(self) -> str:
        """How much of the split was read, for people."""
        whole = len(self.scanned) == self.size
        return f"{self.size:,}" if whole else f"{len(self.scanned):,} of {self.size:,}"

    def known(self, family: str) -> int:
        """How many distinct tasks of a family were read, played or not."""
        return len({task.id for task in self.scanned if family_of(task) == family})


def family_of(task: Task) -> str:
    """`data["family"]`, or `EVERY_FAMILY`."""
    return str(task.data.get("family", EVERY_FAMILY))


def probes_of(environment: Environment) -> Sequence[Probe]:
    """What the optional member `probes()` offers. Raises UsageError if it fails."""
    offered = getattr(environment, "probes", None)
    if offered is None:
        return ()
    try:
        return tuple(offered())
    except FOREIGN_ERRORS as error:  # not our code
        raise UsageError(
            f"the probes of {environment.name} cannot be made: {type(error).__name__}: {error}"
        ) from error


def sample_splits(
    environment: Environment, names: Sequence[str], *, per_family: int, seed: int
) -> list[SplitSample]:
    """Scan each split. Raises UsageError for a split that cannot be read or is empty."""
    return [_sample(environment, name, per_family, seed) for name in names]


def scan_order(name: str, size: int, seed: int) -> list[int]:
    """Which tasks of a split are read, and in which order: at most `MOST_SCANNED`, seeded."""
    return random.Random(f"{seed}/{name}").sample(range(size), min(size, MOST_SCANNED))  # noqa: S311  chance that keeps no secret


def read_tasks(environment: Environment, name: str) -> Sequence[Task]:
    """The tasks of a split. Raises UsageError if the environment cannot give them, or gives none."""
    try:
        tasks = environment.tasks(name)
        size = len(tasks)
    except BuckeyeError:
        raise
    except FOREIGN_ERRORS as error:  # not our code
        raise UsageError(
            f"environment {environment.name} cannot give the tasks of {name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not size:
        raise UsageError(f"environment {environment.name} has no tasks in its split {name!r}")
    return tasks


def _sample(environment: Environment, name: str, per_family: int, seed: int) -> SplitSample:
    tasks = read_tasks(environment, name)
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
    """(split, family, its sampled tasks) of every split."""
    for sample in samples:
        for family, tasks in sample.families.items():
            yield sample.name, family, tasks
