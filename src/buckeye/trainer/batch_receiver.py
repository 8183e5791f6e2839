"""Receiver of batches: rank 0 reads the next batch, and broadcasts it to all ranks of the trainer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from buckeye.base import heartbeat
from buckeye.base.process import RunIdentity, StopFlag
from buckeye.base.storage import step_directory
from buckeye.errors import BuckeyeError, TransportError
from buckeye.trainer.parallel.ranks import Ranks
from buckeye.trainer.quarantine import quarantine_batch
from buckeye.transport.batches import (
    Batch,
    pack_samples,
    read_batch,
    unpack_samples,
)

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_AGREE_SECONDS = 1.0
_REPORT_SECONDS = 60.0
_REWRITE_SECONDS = 60.0
_MAX_DAMAGED = 3


class _PollResult(IntEnum):
    """Result of a poll. If the results of the ranks differ, all ranks use the largest."""

    WAIT = 0
    READY = 1
    STOP = 2
    FAILED = 3


@dataclass(slots=True)
class _Wait:
    """State of the wait for one batch.

    `damaged` has the times at which a damaged batch was found. All times are on the monotonic clock.
    """

    step: int
    deadline: float
    damaged: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReceiver:
    """Receiver of batches from the directory `root`. Rank 0 reads, and all ranks get equal results.

    A damaged batch is moved to `skipped`. The orchestrator detects that the batch is missing, and writes it
    again. `check` raises an error if waiting makes no sense, because publishing has failed.
    """

    root: Path
    skipped: Path
    identity: RunIdentity
    ranks: Ranks
    stop: StopFlag
    timeout_seconds: float
    check: Callable[[], None]

    def next_batch(self, step: int) -> Batch | None:
        """Return the batch of `step`, or None if any rank received a stop request.

        Raise `TransportError` if the batch does not arrive within `timeout_seconds`, or is damaged three
        times. Raise the error of `check`.
        """
        logger.info("Waiting for training batch to arrive")
        heartbeat.report(f"batch {step}", on="orchestrator")
        started = reported = time.monotonic()
        wait = _Wait(step, started + self.timeout_seconds)
        while True:
            result, batch, error = self._poll(wait)
            result = _PollResult(self.ranks.max(result))
            if result == _PollResult.FAILED:
                raise error or TransportError(
                    f"batch {step} was not received: rank 0 failed",
                    code="BK-BATCH",
                    hint="see the log of rank 0",
                )
            if result == _PollResult.STOP:
                return None
            if result == _PollResult.READY:
                return self._share_batch(batch, step)
            if time.monotonic() - reported >= _REPORT_SECONDS:
                reported = time.monotonic()
                logger.info(
                    "Still waiting for batch %d in %s after %.0f s (limit %.0f s)",
                    step,
                    self.root,
                    reported - started,
                    self.timeout_seconds,
                )

    def _poll(self, wait: _Wait) -> tuple[_PollResult, Batch | None, BuckeyeError | None]:
        """Poll for the batch for up to one second. Ranks other than rank 0 only check for a stop request."""
        until = time.monotonic() + _AGREE_SECONDS
        while True:
            if self.stop.requested:
                return _PollResult.STOP, None, None
            if not self.ranks.is_rank_zero:
                return _PollResult.WAIT, None, None
            try:
                self.check()
                batch = self._read(wait)
            except BuckeyeError as error:
                return _PollResult.FAILED, None, error
            if batch is not None:
                return _PollResult.READY, batch, None
            if time.monotonic() > wait.deadline:
                return _PollResult.FAILED, None, self._timeout_error(wait.step)
            if time.monotonic() >= until:
                return _PollResult.WAIT, None, None
            time.sleep(_POLL_SECONDS)

    def _read(self, wait: _Wait) -> Batch | None:
        """Return the batch, or None if it is missing. Move a damaged batch to `skipped` and return None."""
        try:
            batch = read_batch(self.root, wait.step, identity=self.identity)
        except TransportError as error:
            wait.damaged.append(time.monotonic())
            if len(wait.damaged) == _MAX_DAMAGED:
                raise
            logger.warning("Waiting for the orchestrator to write batch %d again: %s", wait.step, error)
            quarantine_batch(self.skipped, step_directory(self.root, wait.step))
            return None
        if batch is None and wait.damaged and time.monotonic() - wait.damaged[-1] >= _REWRITE_SECONDS:
            raise TransportError(
                f"batch {wait.step} in {self.root} was damaged, and was not written again within "
                f"{_REWRITE_SECONDS:g} s",
                code="BK-BATCH",
                hint="see the orchestrator's log",
            )
        return batch

    def _timeout_error(self, step: int) -> TransportError:
        return TransportError(
            f"no batch {step} arrived in {self.root} within {self.timeout_seconds:g} s",
            code="BK-RUN-STALLED",
            hint="see the orchestrator's log, or raise trainer.batch_timeout",
        )

    def _share_batch(self, batch: Batch | None, step: int) -> Batch:
        """Return the batch of rank 0 on all ranks. On other ranks, its `orchestrator_state` is empty."""
        if self.ranks.world_size == 1 and batch is not None:
            return batch
        data = self.ranks.broadcast(None if batch is None else pack_samples(batch.samples))
        return batch or Batch(step=step, samples=unpack_samples(data), orchestrator_state={})
