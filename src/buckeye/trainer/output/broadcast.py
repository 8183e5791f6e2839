"""Broadcast of weights from the trainer's memory to the engines, next to the files of each version."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from buckeye.base.faults import fault_point
from buckeye.base.turns import turns
from buckeye.errors import first_line
from buckeye.transport.broadcast_group import BroadcastGroup
from buckeye.transport.weights import WeightsManifest
from buckeye.transport.weights_offer import (
    AcceptedGroup,
    WeightsOffer,
    accepted_group,
    broadcast_seconds,
    clear_offers,
    offer_weights,
    store_path,
    withdraw_offer,
)

logger = logging.getLogger(__name__)

_OFFER_SECONDS = 30.0
_POLL_SECONDS = 0.005
_MAX_FAILURES = 3
_SET = "trainer.weights.transport is set"
_SETUP_SECONDS = 0.5
_BYTES_PER_SECOND = 0.5e9
"""Cautious estimates for a broadcast: time to connect, and speed."""

Transport = Literal["auto", "files", "broadcast"]


class Broadcaster:
    """Sender of new weights to the engines, on rank 0. A thread sends, and files are written meanwhile.

    A failed broadcast has no effect on the trainer: the engines load the files. After three failures in a
    row, the engines load files only.
    """

    def __init__(self, run: Path, transport: Transport, *, has_adapter: bool) -> None:
        self._run = run
        self._transport = transport
        self._obstacle = "adapters are small" if has_adapter else None
        if turns() is not None:
            self._obstacle = "engine and trainer take turns on one device"
        self._is_chosen: bool | None = None
        self._seconds: float | None = None
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._withdrawn = threading.Event()
        clear_offers(run)

    def choose(self, size: int | None, file_seconds: float | None = None) -> None:
        """Choose once between broadcast and files, and log the choice.

        `size` is the number of bytes of the weights; None if they cannot be kept in memory in the form of
        their files. `file_seconds` is the time to write the files. Without it, "auto" may not choose yet.
        """
        obstacle = self._obstacle or ("saving splits or joins tensors" if size is None else None)
        estimate = _SETUP_SECONDS + (size or 0) / _BYTES_PER_SECOND
        is_refused = False
        if self._is_chosen is not None:
            return
        if self._transport == "files":
            self._is_chosen, reason = False, _SET
        elif obstacle is not None:
            self._is_chosen, reason, is_refused = False, obstacle, self._transport == "broadcast"
        elif self._transport == "broadcast":
            self._is_chosen, reason = True, _SET
        elif file_seconds is not None:
            self._is_chosen = file_seconds > estimate
            reason = f"writing files takes {file_seconds:.2f} s, and a broadcast about {estimate:.2f} s"
        else:
            return
        logger.log(
            logging.WARNING if is_refused else logging.INFO,
            "Engines get new weights by %s: %s",
            "broadcast" if self._is_chosen else "files",
            reason,
        )

    @property
    def is_used(self) -> bool:
        """True if new weights are offered for broadcast."""
        return bool(self._is_chosen) and self._failures < _MAX_FAILURES

    def take_seconds(self) -> float | None:
        """Return the seconds from the last offer to the end of its broadcast, once."""
        seconds, self._seconds = self._seconds, None
        return seconds

    def offer(self, manifest: WeightsManifest, files: Mapping[str, Tensor]) -> None:
        """Offer weights, and start a thread that sends them if the offer is accepted.

        Until `finish`, the contents of `files` must not change.
        """
        try:
            offer = offer_weights(self._run, manifest, {name: file.nbytes for name, file in files.items()})
        except OSError as error:
            self._fail(manifest.step, error)
            return
        fault_point("broadcast.offer")
        self._withdrawn.clear()
        # a daemon: a broadcast must not delay the end of the process
        self._thread = threading.Thread(
            target=self._serve, args=(offer, files), name="broadcast", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Withdraw the offer if it is not accepted, else wait until the broadcast has ended or failed."""
        if self._thread is not None:
            self._withdrawn.set()
            self._thread.join()
            self._thread = None

    def _serve(self, offer: WeightsOffer, files: Mapping[str, Tensor]) -> None:
        began = time.monotonic()
        try:
            group = self._wait_accepted(offer)
            if group is None:
                return
            self._send(offer, group, files)
            self._failures = 0
            self._seconds = time.monotonic() - began
        except Exception as error:  # torch raises several types
            self._fail(offer.manifest.step, error)

    def _fail(self, step: int, error: Exception) -> None:
        self._failures += 1
        logger.debug("Broadcast of weights %d failed: %s", step, first_line(error))
        if self._failures == _MAX_FAILURES:
            logger.warning(
                "Engines get new weights by files from now on: %d broadcasts in a row failed, the last: %s",
                _MAX_FAILURES,
                first_line(error),
            )

    def _wait_accepted(self, offer: WeightsOffer) -> AcceptedGroup | None:
        """Wait until the orchestrator accepts the offer. Withdraw the offer after a few seconds."""
        deadline = time.monotonic() + _OFFER_SECONDS
        while (group := accepted_group(self._run, offer)) is None:
            is_over = self._withdrawn.wait(_POLL_SECONDS) or time.monotonic() > deadline
            if is_over and withdraw_offer(self._run, offer):
                return None
        return group

    def _send(self, offer: WeightsOffer, accepted: AcceptedGroup, files: Mapping[str, Tensor]) -> None:
        group = BroadcastGroup(
            store_path(self._run, offer.store),
            0,
            accepted.size,
            loopback=accepted.loopback,
            seconds=broadcast_seconds(offer.sizes),
        )
        fault_point("broadcast.send")
        group.transfer(files)
        fault_point("broadcast.sent")
