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
    """Download the checkpoint of `resume_step` if the store has a newer one, or if the local one is
    incomplete. Also restore a missing `run.json`.

    Raise `UsageError` if the store has checkpoints of another run, `StoreError`, or `DiskFullError`.
    """
    root = output_dir / "checkpoints"
    here = [info for info in checkpoints_oldest_first(root) if resume_step in (-1, info.step)]
    if resume_step not in (-1, None) and here and is_complete(here[-1]) and _read_run(output_dir):
        return
    store = CheckpointStore(url)
    store.retry(lambda: _bring(store, output_dir, here, resume_step), seconds=_START_SECONDS)


def _bring(
    store: CheckpointStore, output_dir: Path, here: Sequence[CheckpointInfo], resume_step: int | None
) -> None:
    stored = store.list_checkpoints()
    trusted = _trusted(store, reversed(stored))
    first = next(trusted, None)
    if stored:
        _same_run(store, output_dir, first, begins=resume_step is None)
    newest = recency_key(here[-1]) if here else (0, 0)
    for info in itertools.chain([first] if first is not None else [], trusted):
        if resume_step not in (-1, info.step) or recency_key(info) < newest:
            continue
        if recency_key(info) == newest and is_complete(here[-1]):
            return
        try:
            store.download(info, output_dir / "checkpoints")
            return
        except CheckpointError as error:
            _pass_over(info, error)


def _trusted(store: CheckpointStore, infos: Iterable[CheckpointInfo]) -> Iterator[CheckpointInfo]:
    """Yield the checkpoints with a valid manifest."""
    for info in infos:
        try:
            store.manifest(info)
        except CheckpointError as error:
            _pass_over(info, error)
        else:
            yield info


def _pass_over(info: CheckpointInfo, error: CheckpointError) -> None:
    log.warning("Passing over the checkpoint of step %d in the store: %s", info.step, error)


def _same_run(
    store: CheckpointStore, output_dir: Path, newest: CheckpointInfo | None, *, begins: bool
) -> None:
    """Raise `UsageError` unless the store and the directory belong to one run. A directory without a run
    takes over the store's.
    """
    known = _read_run(output_dir)
    if newest is None and not begins:
        return
    there = store.manifest(newest).run if newest is not None else None
    if there is not None and known is None and not begins:
        storage.write_file(output_dir / "run.json", msgspec.json.encode(there))
    elif begins or there is None or known != there.run_id:
        whose = (
            "a run" if there is None or newest is None else f"run {there.run_id}, up to step {newest.step}"
        )
        mine = "this is a new run" if begins else f"{output_dir} is run {known}"
        raise UsageError(
            f"{store.url} has checkpoints of {whose}, and {mine}. Nothing was touched. Go on with that run "
            "by --resume, in a directory of its own, or choose another ckpt.store."
        )


def _read_run(output_dir: Path) -> str | None:
    try:
        return str(storage.read_json(output_dir / "run.json")["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
