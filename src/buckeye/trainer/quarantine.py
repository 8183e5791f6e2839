"""`skipped/`: batches, or samples of them, that were not trained on, to be looked at."""

from __future__ import annotations

import logging
from pathlib import Path

from buckeye.base import storage
from buckeye.base.process import RunIdentity
from buckeye.transport.batches import Batch, write_batch

logger = logging.getLogger(__name__)

_MOST = 10


def keep_skipped(root: Path, batch: Batch, identity: RunIdentity) -> None:
    """Write what was left out of a step to `<root>/step_<N>`, as a batch; only the first few."""
    if _full(root, f"What was left out of step {batch.step}"):
        return
    path = write_batch(root, batch, identity=identity)
    logger.warning("What was left out of step %d is kept in %s.", batch.step, path)


def set_aside(root: Path, damaged: Path) -> None:
    """Move a batch that cannot be read to `<root>/damaged_<name>`, or delete it if enough are kept."""
    target = root / f"damaged_{damaged.name}"
    if target.exists() or _full(root, f"The damaged {damaged}"):
        storage.remove_directory(damaged)
        return
    root.mkdir(parents=True, exist_ok=True)
    try:
        damaged.rename(target)
    except FileNotFoundError:  # somebody deleted it
        return
    logger.warning("%s is kept as %s.", damaged, target)


def _full(root: Path, what: str) -> bool:
    full = len(list(root.glob("*step_*"))) >= _MOST
    if full:
        logger.warning("%s is not kept: %s holds %d.", what, root, _MOST)
    return full
