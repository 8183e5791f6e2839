"""Waiting for the next batch, on all ranks at once."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from buckeye.errors import TransportError
from buckeye.process import RunIdentity, StopFlag
from buckeye.trainer.distributed import Ranks
from buckeye.transport.batches import Batch, batches_end, read_batch

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_AGREE_SECONDS = 1.0
_REPORT_SECONDS = 60.0


class _Verdict(IntEnum):
    """What the ranks agree on; the largest that any of them says counts."""

    WAIT = 0
    READY = 1
    STOP = 2
    FAILED = 3
    ENDED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Inbox:
    """Where batches arrive. The first rank looks for them; all ranks leave a wait together, with the same
    answer."""

    root: Path
    identity: RunIdentity
    ranks: Ranks
    stop: StopFlag
    timeout_seconds: float

    def next_batch(self, step: int) -> Batch | None:
        """The batch of `step`, or None if any rank has been asked to stop, or if there is none any more:
        `ended` tells which.

        Raises `TransportError` if none arrives within `timeout_seconds`, or if it is damaged.
        """
        logger.info("Waiting for training batch to arrive")
        started = reported = time.monotonic()
        while True:
            verdict, batch, error = self._look(step, started)
            verdict = _Verdict(self.ranks.max(verdict))
            if verdict == _Verdict.FAILED:
                raise error or TransportError(f"Another rank could not get batch {step}; see its log.")
            if verdict in (_Verdict.STOP, _Verdict.ENDED):
                return None
            if verdict == _Verdict.READY:
                return batch or self._must_read(step)
            if time.monotonic() - reported >= _REPORT_SECONDS:
                reported = time.monotonic()
                logger.info(
                    "Still waiting for batch %d in %s, for %.0f s (limit %.0f s)",
                    step,
                    self.root,
                    reported - started,
                    self.timeout_seconds,
                )

    def ended(self, step: int) -> bool:
        """Whether the orchestrator has said that there is no batch of `step`."""
        end = batches_end(self.root, identity=self.identity)
        return end is not None and end <= step

    def _look(self, step: int, started: float) -> tuple[_Verdict, Batch | None, TransportError | None]:
        """Look for the batch, for a second at most. Ranks other than the first only say whether to stop."""
        until = time.monotonic() + _AGREE_SECONDS
        while True:
            if self.stop.requested:
                return _Verdict.STOP, None, None
            if not self.ranks.first:
                return _Verdict.WAIT, None, None
            try:
                batch = read_batch(self.root, step, identity=self.identity)
                if batch is None and self.ended(step):
                    return _Verdict.ENDED, None, None
            except TransportError as error:
                return _Verdict.FAILED, None, error
            if batch is not None:
                return _Verdict.READY, batch, None
            now = time.monotonic()
            if now - started >= self.timeout_seconds:
                return _Verdict.FAILED, None, self._too_late(step)
            if now >= until:
                return _Verdict.WAIT, None, None
            time.sleep(_POLL_SECONDS)

    def _too_late(self, step: int) -> TransportError:
        return TransportError(
            f"No batch {step} arrived in {self.root} within {self.timeout_seconds:g} s. "
            "See the orchestrator's log for what it waits for, or raise trainer.batch_timeout."
        )

    def _must_read(self, step: int) -> Batch:
        batch = read_batch(self.root, step, identity=self.identity)
        if batch is None:
            raise TransportError(
                f"Batch {step} in {self.root} is seen by the first rank but not by this one."
            )
        return batch
