"""Which checkpoints there are, which one to resume from, which ones to delete."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye import storage
from buckeye.errors import CheckpointError

COMMITTED = "COMMITTED"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint: the state after `step` optimizer steps, written by the run's `attempt`."""

    step: int
    attempt: int
    path: Path


def list_checkpoints(root: Path) -> list[CheckpointInfo]:
    """Every committed checkpoint under `root`, by step. Directories without a commit are not seen."""
    found = []
    for step, path in storage.step_directories(root).items():
        try:
            found.append(CheckpointInfo(step, int(read_commit(path)["attempt"]), path))
        except CheckpointError:
            continue
    return found


def checkpoints_by_age(root: Path) -> list[CheckpointInfo]:
    """Every committed checkpoint under `root`, by (attempt, step): the last is the newest."""
    return sorted(list_checkpoints(root), key=lambda info: (info.attempt, info.step))


def resolve_checkpoint(root: Path, resume_step: int) -> CheckpointInfo:
    """The checkpoint that `resume_step` means: the newest, by (attempt, step), for -1."""
    available = checkpoints_by_age(root)
    if not available:
        raise CheckpointError(f"There is no committed checkpoint in {root}. Start without a resume step.")
    if resume_step == -1:
        return available[-1]
    for info in available:
        if info.step == resume_step:
            return info
    steps = ", ".join(str(step) for step in sorted(info.step for info in available))
    raise CheckpointError(f"There is no checkpoint of step {resume_step} in {root}. There are: {steps}.")


def prune_checkpoints(root: Path, keep: int, *, protected: Collection[int] = ()) -> list[int]:
    """Delete all but the `keep` newest committed checkpoints and those of `protected` steps; returns the
    steps that were deleted."""
    by_age = checkpoints_by_age(root)
    old = [info for info in by_age[: max(0, len(by_age) - keep)] if info.step not in protected]
    for info in old:
        storage.remove_directory(info.path)
    return [info.step for info in old]


def read_commit(path: Path) -> dict[str, Any]:
    """The `COMMITTED` manifest of a checkpoint directory; `CheckpointError` if there is none to trust."""
    try:
        commit = storage.read_json(path / COMMITTED)
        if not isinstance(commit["files"], dict) or not isinstance(commit["attempt"], int):
            raise TypeError("not a commit manifest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a committed checkpoint ({error}).") from error
    return commit
