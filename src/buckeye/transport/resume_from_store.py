"""Download of a checkpoint from the object store of a run, before the run resumes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from buckeye.base import storage
from buckeye.errors import UsageError
from buckeye.transport.checkpoint import (
    CheckpointInfo,
    checkpoints_oldest_first,
    first_valid_checkpoint,
    is_complete,
)
from buckeye.transport.object_store import CheckpointStore, recency_key

_START_SECONDS = 30.0


def restore_from_store(output_dir: Path, url: str, resume_step: int | None) -> None:
    """Download the checkpoint of `resume_step` from the store to the run directory.

    If `resume_step` is -1, download the newest checkpoint. Skip the download if the run directory already has
    this checkpoint, or a newer one. Also restore a missing `run.json`. If `resume_step` is None, the run is
    new: only check that the store is empty.

    Raise `UsageError` if the store belongs to another run. Raise `StoreError` or `DiskFullError` if the
    download fails.
    """
    root = output_dir / "checkpoints"
    local = [info for info in checkpoints_oldest_first(root) if resume_step in (-1, info.step)]
    if resume_step not in (-1, None) and local and is_complete(local[-1]) and _read_run_id(output_dir):
        return
    store = CheckpointStore(url)
    store.retry(lambda: _restore(store, output_dir, local, resume_step), seconds=_START_SECONDS)


def _restore(
    store: CheckpointStore, output_dir: Path, local: Sequence[CheckpointInfo], resume_step: int | None
) -> None:
    stored = store.list_checkpoints()[::-1]
    newest = first_valid_checkpoint(stored, store.manifest)
    if stored:
        _check_same_run(store, output_dir, newest, is_new_run=resume_step is None)
    local_key = recency_key(local[-1]) if local else (0, 0)
    has_local = bool(local) and is_complete(local[-1])
    candidates = [
        info
        for info in (stored[stored.index(newest) :] if newest is not None else ())
        if resume_step in (-1, info.step)
        and (recency_key(info) > local_key or (recency_key(info) == local_key and not has_local))
    ]
    first_valid_checkpoint(candidates, lambda info: store.download(info, output_dir / "checkpoints"))


def _check_same_run(
    store: CheckpointStore, output_dir: Path, newest: CheckpointInfo | None, *, is_new_run: bool
) -> None:
    """Raise `UsageError` unless store and directory belong to the same run.

    If the directory has no `run.json`, restore it from the store.
    """
    run_id = _read_run_id(output_dir)
    if newest is None and not is_new_run:
        return
    stored_run = store.manifest(newest).run if newest is not None else None
    if stored_run is not None and run_id is None and not is_new_run:
        storage.write_file(output_dir / "run.json", msgspec.json.encode(stored_run))
    elif is_new_run or stored_run is None or run_id != stored_run.run_id:
        owner = "a run"
        if stored_run is not None and newest is not None:
            owner = f"run {stored_run.run_id}, up to step {newest.step}"
        this_run = "this is a new run" if is_new_run else f"{output_dir} is run {run_id}"
        raise UsageError(
            f"{store.url} has checkpoints of {owner}, but {this_run}; nothing was changed",
            code="BK-RUN-MISMATCH",
            hint="resume that run with --resume in a separate directory, or choose another ckpt.store",
        )


def _read_run_id(output_dir: Path) -> str | None:
    try:
        return str(storage.read_json(output_dir / "run.json")["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
