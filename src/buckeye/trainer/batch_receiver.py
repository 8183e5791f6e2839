"""Receiver of batches: rank 0 broadcasts the header of the next batch, and each rank reads its samples."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from buckeye.base import heartbeat
from buckeye.base.process import RunIdentity, StopFlag
from buckeye.base.storage import step_directory
from buckeye.errors import BuckeyeError, TransportError
from buckeye.trainer.micro_batches import read_together
from buckeye.trainer.parallel.ranks import Ranks
from buckeye.trainer.quarantine import quarantine_batch
from buckeye.transport.batches import (
    Batch,
    BatchDamageError,
    Sample,
    open_batch,
    read_header,
    read_samples,
)

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.005
_AGREE_SECONDS = 1.0
_REPORT_SECONDS = 60.0
_REWRITE_SECONDS = 60.0
_MAX_DAMAGED = 3

_Header = tuple[bytes, Mapping[str, Any]]  # encoded header, and the orchestrator's state


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
    `failure` is the error of a batch that was damaged too often.
    """

    step: int
    deadline: float
    damaged: list[float] = field(default_factory=list)
    failure: BatchDamageError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReceiver:
    """Receiver of batches from the directory `root`, which all ranks share.

    Rank 0 waits for the batch. Then each rank reads the samples that `share` returns for it. If any rank
    finds damage, no rank gets the batch, and it is moved to `skipped`. The orchestrator detects that the
    batch is missing, and writes it again. `check` raises an error if waiting makes no sense, because
    publishing has failed.
    """

    root: Path
    skipped: Path
    identity: RunIdentity
    ranks: Ranks
    stop: StopFlag
    timeout_seconds: float
    check: Callable[[], None]
    share: Callable[[Batch], Iterable[Sample]]

    def next_batch(self, step: int) -> Batch | None:
        """Return the batch of `step`, or None if any rank received a stop request.

        The samples of other ranks are not in memory. On other ranks, `orchestrator_state` is empty.

        Raise `TransportError` if the batch does not arrive within `timeout_seconds`, or is damaged three
        times. Raise the error of `check`.
        """
        logger.info("Waiting for training batch to arrive")
        heartbeat.report(f"batch {step}", on="orchestrator")
        started = reported = time.monotonic()
        wait = _Wait(step, started + self.timeout_seconds)
        while True:
            result, header, error = self._poll(wait)
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
                batch, damage = self._receive(header, step)
                if damage is None:
                    return batch
                self._reject(wait, damage)
            if time.monotonic() - reported >= _REPORT_SECONDS:
                reported = time.monotonic()
                logger.info(
                    "Still waiting for batch %d in %s after %.0f s (limit %.0f s)",
                    step,
                    self.root,
                    reported - started,
                    self.timeout_seconds,
                )

    def _poll(self, wait: _Wait) -> tuple[_PollResult, _Header | None, BuckeyeError | None]:
        """Poll for the header for up to one second. Ranks other than rank 0 only check for a stop request."""
        until = time.monotonic() + _AGREE_SECONDS
        while True:
            if self.stop.requested:
                return _PollResult.STOP, None, None
            if not self.ranks.is_rank_zero:
                return _PollResult.WAIT, None, wait.failure
            try:
                self.check()
                header = self._read(wait)
            except BuckeyeError as error:
                return _PollResult.FAILED, None, error
            if header is not None:
                return _PollResult.READY, header, None
            if time.monotonic() > wait.deadline:
                return _PollResult.FAILED, None, self._timeout_error(wait.step)
            if time.monotonic() >= until:
                return _PollResult.WAIT, None, None
            time.sleep(_POLL_SECONDS)

    def _read(self, wait: _Wait) -> _Header | None:
        """Return the header, or None if it is missing or damaged. Raise the final error of the wait."""
        header = None
        if wait.failure is None:
            try:
                header = read_header(self.root, wait.step, identity=self.identity)
            except BatchDamageError as error:
                self._reject(wait, error)
        if wait.failure is not None:
            raise wait.failure
        if header is None and wait.damaged and time.monotonic() - wait.damaged[-1] >= _REWRITE_SECONDS:
            raise TransportError(
                f"batch {wait.step} in {self.root} was damaged, and was not written again within "
                f"{_REWRITE_SECONDS:g} s",
                code="BK-BATCH",
                hint="see the orchestrator's log",
            )
        return header

    def _receive(self, header: _Header | None, step: int) -> tuple[Batch, BatchDamageError | None]:
        """Open the batch whose header rank 0 has, and read this rank's samples.

        If any rank finds damage, also return an error on all ranks.
        """
        data, state = header or (None, {})
        batch = open_batch(self.root, step, self.ranks.broadcast(data), state)
        return batch, read_together(self.ranks, lambda: read_samples(self.share(batch)))

    def _reject(self, wait: _Wait, error: BatchDamageError) -> None:
        """Move a damaged batch to `skipped`, so that it is written again; the last time, keep it."""
        wait.damaged.append(time.monotonic())
        if len(wait.damaged) >= _MAX_DAMAGED:
            wait.failure = error
            return
        logger.warning("Waiting for the orchestrator to write batch %d again: %s", wait.step, error)
        if self.ranks.is_rank_zero:
            quarantine_batch(self.skipped, step_directory(self.root, wait.step))

    def _timeout_error(self, step: int) -> TransportError:
        return TransportError(
            f"no batch {step} arrived in {self.root} within {self.timeout_seconds:g} s",
            code="BK-RUN-STALLED",
            hint="see the orchestrator's log, or raise trainer.batch_timeout",
        )
