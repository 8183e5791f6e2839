"""Batches that were handed over and may have to be written again."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from buckeye.base.disk import write_when_room_async
from buckeye.base.faults import fault_point
from buckeye.base.process import RunIdentity
from buckeye.transport.batches import Batch, batch_bytes, batch_directory, write_batch
from buckeye.transport.weights import newest_weights

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


class Outbox:
    """Writes batches, and keeps each until it is trained on.

    The trainer publishes version N + 1 of the weights before it removes batch N. A batch that is gone while
    no version after it is there was damaged and set aside, or deleted by somebody: it is written again.
    """

    def __init__(self, output_dir: Path, identity: RunIdentity) -> None:
        self._root = output_dir / "batches"
        self._weights = output_dir / "weights"
        self._identity = identity
        self._kept: dict[int, Batch] = {}
        self.written_again = 0
        """How many batches had to be."""

    async def write(self, batch: Batch) -> None:
        """Hand a batch over, as soon as there is room on the disk."""
        fault_point("batch.write")
        await self._write(batch)
        self._kept[batch.step] = batch
        fault_point("batch.written")

    async def run(self) -> None:
        """Until cancelled, write again what is missing and forget what is trained."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Write again what is missing, forget what is trained."""
        # in this order: the batch goes after the weights have come
        missing = [step for step in self._kept if not batch_directory(self._root, step).exists()]
        if not missing:
            return
        newest = newest_weights(self._weights, identity=self._identity)
        version = newest[0] if newest is not None else -1
        for step in [step for step in self._kept if step < version]:
            del self._kept[step]
        for step in [step for step in missing if step in self._kept]:
            log.warning("Batch %d is gone and was not trained on: it is written again", step)
            await self._write(self._kept[step])
            self.written_again += 1

    async def _write(self, batch: Batch) -> None:
        path = batch_directory(self._root, batch.step)
        write = partial(write_batch, self._root, batch, identity=self._identity)
        await write_when_room_async(path, write, what=f"batch {batch.step}", needed=batch_bytes(batch))
