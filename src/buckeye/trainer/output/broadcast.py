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
from buckeye.trainer.output.stored_weights import StoredWeights
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

_OFFER_SECONDS = 5.0
_POLL_SECONDS = 0.005
_MAX_FAILURES = 3
_SETUP_SECONDS = 0.1
_BYTES_PER_SECOND = 0.5e9
"""Cautious estimates for a broadcast over loopback: time to connect, and speed."""

Transport = Literal["auto", "files", "broadcast"]


class Broadcaster:
    """Sender of new weights to the engines, on rank 0. A thread sends, and files are written meanwhile.

    A failed broadcast has no effect on the trainer: the engines load the files. After three failures in a
    row, and for `obstacle`, the reason why a broadcast cannot work, the engines load files only.
    """

    def __init__(self, run: Path, transport: Transport, *, obstacle: str | None) -> None:
        self._run = run
        self._transport = transport
        self._obstacle = obstacle
        self._is_chosen: bool | None = None
        self._seconds: float | None = None
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._withdrawn = threading.Event()
        clear_offers(run)

    def choose(self, stored: StoredWeights | None, file_seconds: float | None = None) -> None:
        """Choose once between broadcast and files, and log the choice.

        `stored` are the weights in memory, if they can be kept there. They were written to files in
        `file_seconds`. Without this time, "auto" makes no choice unless a broadcast is impossible.
        """
        if self._is_chosen is not None:
            return
        obstacle = self._obstacle or ("saving splits or joins tensors" if stored is None else None)
        is_chosen, reason = False, "trainer.weights.transport is set"
        if self._transport != "files" and (stored is None or obstacle is not None):
            reason = str(obstacle)
        elif self._transport == "broadcast":
            is_chosen = True
        elif self._transport == "auto" and stored is not None:
            if file_seconds is None:
                return
            size = sum(file.nbytes for file in stored.files.values())
            estimate = _SETUP_SECONDS + size / _BYTES_PER_SECOND
            is_chosen = file_seconds > estimate
            reason = f"writing files takes {file_seconds:.2f} s, and a broadcast about {estimate:.2f} s"
        self._is_chosen = is_chosen
        is_refused = self._transport == "broadcast" and not is_chosen
        logger.log(
            logging.WARNING if is_refused else logging.INFO,
            "Engines get new weights by %s: %s",
            "broadcast" if is_chosen else "files",
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


def broadcast_obstacle(*, adapter: bool) -> str | None:
    """Return the reason why this run cannot broadcast its weights, or None."""
    if adapter:
        return "adapters are small"
    return "engine and trainer take turns on one device" if turns() is not None else None
