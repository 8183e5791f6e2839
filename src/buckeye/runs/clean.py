"""Files in a run directory that can be deleted without harm to the run, and their sizes."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from buckeye.base.disk import size_of
from buckeye.base.storage import find_leftovers, is_locked, remove_directory, step_directories
from buckeye.errors import BuckeyeError
from buckeye.run_files.directory import earlier_logs, files_of_a_run
from buckeye.runs.status import find_checkpoint
from buckeye.transport.checkpoint import checkpoints_oldest_first

Kind = Literal["weights", "rollouts", "batches", "trained", "skipped", "logs", "unfinished", "checkpoints"]
FILE_KINDS: tuple[Kind, ...] = get_args(Kind)
KINDS_IN_USE: tuple[Kind, ...] = ("weights", "batches")
"""Kinds of files that the processes of an active run read."""

KIND_DESCRIPTIONS: dict[Kind, str] = {
    "weights": "all versions but the newest",
    "rollouts": "the text of every rollout of training",
    "batches": "batches that were not trained on",
    "trained": "batches that were trained on, kept for `rl replay`",
    "skipped": "batches that nothing could be learned from, kept for inspection",
    "logs": "output of the processes of earlier attempts",
    "unfinished": "partial files of processes that were killed",
    "checkpoints": "all but the newest and the best",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletable:
    """File or directory that can be deleted, with its size in bytes."""

    kind: Kind
    path: Path
    size: int


def find_deletable(
    output_dir: Path, *, kinds: Collection[Kind] = FILE_KINDS, keep_checkpoints: int | None = None
) -> list[Deletable]:
    """Return the files that can be deleted in a run directory.

    For an active run, `kinds` must not contain any of `KINDS_IN_USE`. Without `keep_checkpoints`, no
    checkpoint is listed. With it, all are listed except the newest `keep_checkpoints` (1 or more) and the
    best by evaluation. The newest weights, evaluations, metrics and exports are never listed.
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
        for kind in FILE_KINDS
        if kind in kinds
        for path in found[kind]
    ]


def delete_files(items: Sequence[Deletable]) -> None:
    """Delete the items. Readers see either the whole directory of a step or nothing."""
    for item in items:
        if item.kind == "unfinished" and item.path.is_dir():
            shutil.rmtree(item.path)
        elif item.path.is_dir():
            remove_directory(item.path)
        else:
            item.path.unlink(missing_ok=True)


def _unfinished(output_dir: Path) -> list[Path]:
    folders = [output_dir, *(path for path in files_of_a_run(output_dir) if path.is_dir())]
    downloads = (output_dir / "checkpoints").glob(".*.download")  # partial downloads from an object store
    return [*(path for folder in folders for path in find_leftovers(folder)), *downloads]


def _old_checkpoints(output_dir: Path, keep: int) -> list[Path]:
    by_age = checkpoints_oldest_first(output_dir / "checkpoints")
    try:
        best = find_checkpoint(output_dir, "best").path
    except BuckeyeError:  # no checkpoint, or no evaluation
        best = None
    old = by_age[: max(0, len(by_age) - keep)]
    return [info.path for info in old if info.path != best and not is_locked(info.path)]  # locked: an upload
