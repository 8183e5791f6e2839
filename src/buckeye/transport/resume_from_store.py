"""Resume from a run's object store."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from buckeye.base import storage
from buckeye.errors import CheckpointError, UsageError
from buckeye.transport.checkpoint import (
    CheckpointInfo,
    checkpoints_oldest_first,
    is_complete,
)
from buckeye.transport.object_store import CheckpointStore, recency_key

log = logging.getLogger(__name__)

_START_SECONDS = 30.0


def restore_from_store(output_dir: Path, url: str, resume_step: int | None) -> None:
    """Download the checkpoint of `resume_step` if the store has a newer one or the local one is incomplete.

    Also restore a missing `run.json`.

    Raise `UsageError` if the store has checkpoints of another run, `StoreError`, or `DiskFullError`.
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
    stored = store.list_checkpoints()
    valid = _with_valid_manifest(store, reversed(stored))
    newest = next(valid, None)
    if stored:
        _check_same_run(store, output_dir, newest, is_new_run=resume_step is None)
    newest_local = recency_key(local[-1]) if local else (0, 0)
    for info in itertools.chain([newest] if newest is not None else [], valid):
        if resume_step not in (-1, info.step) or recency_key(info) < newest_local:
            continue
        if recency_key(info) == newest_local and is_complete(local[-1]):
            return
        try:
            store.download(info, output_dir / "checkpoints")
            return
        except CheckpointError as error:
            _log_skipped(info, error)


def _with_valid_manifest(store: CheckpointStore, infos: Iterable[CheckpointInfo]) -> Iterator[CheckpointInfo]:
    for info in infos:
        try:
            store.manifest(info)
        except CheckpointError as error:
            _log_skipped(info, error)
        else:
            yield info


def _log_skipped(info: CheckpointInfo, error: CheckpointError) -> None:
    log.warning("Skipping the checkpoint of step %d in the store: %s", info.step, error)


def _check_same_run(
    store: CheckpointStore, output_dir: Path, newest: CheckpointInfo | None, *, is_new_run: bool
) -> None:
    """Raise `UsageError` unless the store and the directory belong to one run.

    A directory without a run takes over the store's.
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
