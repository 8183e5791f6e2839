"""What a run goes on from comes from its object store, to every node that lacks it."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from buckeye.base import heartbeat, storage
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import CheckpointError, UsageError
from buckeye.transport.checkpoint import (
    CheckpointInfo,
    checkpoints_by_age,
    is_complete,
    list_checkpoints,
    resolve_checkpoint,
)
from buckeye_machines.object_store import Store, age

log = logging.getLogger(__name__)

_START_SECONDS = 30.0
_POLL_SECONDS = 0.5


def bring(output_dir: Path, url: str, resume_step: int | None) -> None:
    """Have the checkpoint here that `resume_step` means, where the store has a newer one, or one of which
    something is missing here; and `run.json`, where that is gone.

    Raises UsageError if the store has checkpoints of another run, StoreError, and DiskFullError.
    """
    root = output_dir / "checkpoints"
    here = [info for info in checkpoints_by_age(root) if resume_step in (-1, info.step)]
    if resume_step not in (-1, None) and here and is_complete(here[-1]) and _read_run(output_dir):
        return
    store = Store(url)
    store.patiently(lambda: _bring(store, output_dir, here, resume_step), seconds=_START_SECONDS)


def _bring(store: Store, output_dir: Path, here: Sequence[CheckpointInfo], resume_step: int | None) -> None:
    stored = store.checkpoints()
    trusted = _trusted(store, reversed(stored))
    first = next(trusted, None)
    if stored:
        _same_run(store, output_dir, first, begins=resume_step is None)
    newest = age(here[-1]) if here else (0, 0)
    for info in itertools.chain([first] if first is not None else [], trusted):
        if resume_step not in (-1, info.step) or age(info) < newest:
            continue
        if age(info) == newest and is_complete(here[-1]):
            return
        try:
            store.fetch(info, output_dir / "checkpoints")
            return
        except CheckpointError as error:
            _pass_over(info, error)


def _trusted(store: Store, infos: Iterable[CheckpointInfo]) -> Iterator[CheckpointInfo]:
    """Those whose manifest can be."""
    for info in infos:
        try:
            store.manifest(info)
        except CheckpointError as error:
            _pass_over(info, error)
        else:
            yield info


def _pass_over(info: CheckpointInfo, error: CheckpointError) -> None:
    log.warning("Passing over the checkpoint of step %d in the store: %s", info.step, error)


def _same_run(store: Store, output_dir: Path, newest: CheckpointInfo | None, *, begins: bool) -> None:
    """Raise UsageError unless the store's run is that of the directory; without one the directory becomes
    that of the store's."""
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


class Ranks(Protocol):
    """What is asked of a trainer's ranks."""

    @property
    def first(self) -> bool:
        """Whether this is the first."""

    def max(self, value: int) -> int:
        """The largest of the ranks' values."""


def brought(config: TrainerConfig | SFTConfig, ranks: Ranks, first_of_node: bool) -> int:
    """The step to go on from, when every rank has it in its directory; where that is not the first one's, it
    comes from the store. All ranks call it together."""
    assert config.ckpt is not None
    assert config.ckpt.store is not None
    assert config.ckpt.resume_step is not None
    root, store, patience = config.output_dir / "checkpoints", config.ckpt.store, config.ckpt.store_timeout
    step = config.ckpt.resume_step

    def here() -> bool:
        return any(info.step == chosen and is_complete(info) for info in list_checkpoints(root))

    def bring_here() -> None:
        deadline = time.monotonic() + patience
        while not here():  # the first rank may be about to upload it
            bring(config.output_dir, store, chosen)
            if not here() and time.monotonic() > deadline:
                raise CheckpointError(f"The checkpoint of step {chosen} did not come to {store}.")
            time.sleep(_POLL_SECONDS)

    chosen = ranks.max(resolve_checkpoint(root, step).step if ranks.first else 0)
    if not ranks.max(int(not here())):
        return step
    for turn in (ranks.first, not ranks.first and first_of_node):  # who shares its directory has it then
        with ThreadPoolExecutor(1) as threads:
            work: Future[Any] = threads.submit(bring_here if turn else int)
            while ranks.max(int(not work.done())):  # none of them is in a collective meanwhile
                heartbeat.report(f"the checkpoint of step {chosen}", on="store")
                time.sleep(_POLL_SECONDS)
            work.result()
    return chosen
