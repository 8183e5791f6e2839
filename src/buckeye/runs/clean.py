"""What in a run's directory can be deleted without ending its usefulness, and how much that frees."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from buckeye.base.disk import size_of
from buckeye.base.storage import is_locked, leftovers, remove_directory, step_directories
from buckeye.errors import BuckeyeError
from buckeye.run_files.directory import earlier_logs, files_of_a_run
from buckeye.runs.status import find_checkpoint
from buckeye.transport.checkpoint import checkpoints_by_age

Kind = Literal["weights", "rollouts", "batches", "trained", "skipped", "logs", "unfinished", "checkpoints"]
KINDS: tuple[Kind, ...] = get_args(Kind)
IN_USE: tuple[Kind, ...] = ("weights", "batches")
"""What the processes of a run that goes on read."""

WHAT_THEY_ARE: dict[Kind, str] = {
    "weights": "all versions but the newest",
    "rollouts": "the text of every rollout of training",
    "batches": "batches that were not trained on",
    "trained": "batches that were trained on, kept for `rl replay`",
    "skipped": "batches that nothing could be learned from, kept to be looked at",
    "logs": "what the processes of earlier attempts printed",
    "unfinished": "left by writers that were killed",
    "checkpoints": "all but the newest and the best",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletable:
    """A file or directory, and its bytes."""

    kind: Kind
    path: Path
    size: int


def deletable(
    output_dir: Path, *, kinds: Collection[Kind] = KINDS, keep_checkpoints: int | None = None
) -> list[Deletable]:
    """What can be deleted in the directory of a run; if it goes on, nothing that is `IN_USE` must be among
    `kinds`.

    Checkpoints only with `keep_checkpoints`, the number of the newest ones that stay (1 or more); the best
    one by evaluation stays too. Neither the newest weights nor evaluations, metrics or exports are listed.
    """
    found: dict[Kind, Sequence[Path]] = {
        "weights": list(step_directories(output_dir / "weights").values())[:-1],
        "rollouts": sorted((output_dir / "rollouts").glob("step_*.jsonl")),
        "batches": list(step_directories(output_dir / "batches").values()),
        "trained": list(step_directories(output_dir / "trained").values()),
        "skipped": list(step_directories(output_dir / "skipped").values()),
        "logs": earlier_logs(output_dir),
        "unfinished": _unfinished(output_dir),
        "checkpoints": [] if keep_checkpoints is None else _old_checkpoints(output_dir, keep_checkpoints),
    }
    return [
        Deletable(kind=kind, path=path, size=size_of(path))
        for kind in KINDS
        if kind in kinds
        for path in found[kind]
    ]


def delete(items: Sequence[Deletable]) -> None:
    """Delete them; a step's directory so that a reader sees all of it or none of it."""
    for item in items:
        if item.kind == "unfinished" and item.path.is_dir():
            shutil.rmtree(item.path)
        elif item.path.is_dir():
            remove_directory(item.path)
        else:
            item.path.unlink(missing_ok=True)


def _unfinished(output_dir: Path) -> list[Path]:
    folders = [output_dir, *(path for path in files_of_a_run(output_dir) if path.is_dir())]
    downloads = (output_dir / "checkpoints").glob(".*.download")  # from an object store
    return [*(path for folder in folders for path in leftovers(folder)), *downloads]


def _old_checkpoints(output_dir: Path, keep: int) -> list[Path]:
    by_age = checkpoints_by_age(output_dir / "checkpoints")
    try:
        best = find_checkpoint(output_dir, "best").path
    except BuckeyeError:  # none, or none was evaluated
        best = None
    old = by_age[: max(0, len(by_age) - keep)]
    return [info.path for info in old if info.path != best and not is_locked(info.path)]  # or is uploaded now
