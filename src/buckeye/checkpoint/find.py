"""Which checkpoints there are, which one to resume from, which ones to delete."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye import storage
from buckeye.errors import CheckpointError

log = logging.getLogger(__name__)

COMMITTED = "COMMITTED"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint: the state after `step` optimizer steps, written by the run's `attempt`."""

    step: int
    attempt: int
    path: Path


def list_checkpoints(root: Path) -> list[CheckpointInfo]:
    """Every committed checkpoint under `root`, by step. Directories without a commit are not seen."""
    found = ((step, path, _attempt_of(path)) for step, path in storage.step_directories(root).items())
    return [CheckpointInfo(step, attempt, path) for step, path, attempt in found if attempt is not None]


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


def usable_checkpoint(
    root: Path,
    resume_step: int,
    verify: Callable[[CheckpointInfo], None],
    *,
    preferred: CheckpointInfo | None = None,
) -> CheckpointInfo:
    """The checkpoint that a run goes on from: the one resolver, of the launcher and of every process.

    For -1 it is the `preferred` one, else the newest that is whole; what is damaged before it is named in a
    warning. `verify` raises `CheckpointError` for what is damaged. So does this, if it is a step that was
    asked for, or if none is whole.
    """
    if resume_step != -1:
        info = resolve_checkpoint(root, resume_step)
        verify(info)
        return info
    for path in _unreadable(root):
        log.warning("Passing over %s: it has no readable %s", path, COMMITTED)
    resolve_checkpoint(root, -1)  # says so if there is none at all
    first = [preferred] if preferred is not None else []
    whole = first_whole([*first, *(i for i in reversed(checkpoints_by_age(root)) if i not in first)], verify)
    if whole is None:
        raise CheckpointError(
            f"Every checkpoint in {root} is damaged; the warnings above say how. Start again with --clean, "
            "or in a new directory."
        )
    return whole


def first_whole(
    infos: Iterable[CheckpointInfo], verify: Callable[[CheckpointInfo], None]
) -> CheckpointInfo | None:
    """The first that `verify` raises no `CheckpointError` for; those before it are named in warnings."""
    for info in infos:
        try:
            verify(info)
        except CheckpointError as error:
            log.warning("Passing over the checkpoint of step %d, which is damaged: %s", info.step, error)
        else:
            return info
    return None


def prune_checkpoints(root: Path, keep: int, *, protected: Collection[int] = ()) -> list[int]:
    """Delete all but the `keep` newest committed checkpoints and those of `protected` steps; returns the
    steps that were deleted."""
    by_age = checkpoints_by_age(root)
    old = [info for info in by_age[: max(0, len(by_age) - keep)] if info.step not in protected]
    for info in old:
        storage.remove_directory(info.path)
    return [info.step for info in old]


def _unreadable(root: Path) -> list[Path]:
    """The directories of steps that nobody can have committed as they are."""
    return [path for path in storage.step_directories(root).values() if _attempt_of(path) is None]


def _attempt_of(path: Path) -> int | None:
    """Which attempt committed a directory; None if none did."""
    try:
        return int(read_commit(path)["attempt"])
    except CheckpointError:
        return None


def read_commit(path: Path) -> dict[str, Any]:
    """The `COMMITTED` manifest of a checkpoint directory; `CheckpointError` if there is none to trust."""
    try:
        commit = storage.read_json(path / COMMITTED)
        if not isinstance(commit["files"], dict) or not isinstance(commit["attempt"], int):
            raise TypeError("not a commit manifest")
        if any("\0" in name for name in commit["files"]):
            raise ValueError("a name of a file has a zero byte")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a committed checkpoint ({error}).") from error
    return commit
