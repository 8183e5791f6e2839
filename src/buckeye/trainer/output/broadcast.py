"""Transfer of weights from the trainer's memory to the engines, next to the files of each version.

Engines on the trainer's machine read shared memory, and others receive a broadcast.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path
from typing import Literal

from buckeye.base.faults import fault_point
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

_OFFER_SECONDS = 30.0
_POLL_SECONDS = 0.005
_MAX_FAILURES = 3
_SET = "trainer.weights.transport is set"
_SETUP_SECONDS = {"shared memory": 0.1, "broadcast": 0.5}
_BYTES_PER_SECOND = {"shared memory": 1.5e9, "broadcast": 0.5e9}
"""Cautious estimates: time to connect, and speed."""

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
        self._is_chosen: bool | None = None
        self._reason = ""
        self._file_seconds = math.inf
        self._route: str | None = None
        self._seconds: float | None = None
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._withdrawn = threading.Event()
        clear_offers(run)

    def choose(self, stored: StoredWeights | None, file_seconds: float | None = None) -> None:
        """Choose once between memory and files, and log the choice of files.

        `stored` are the weights in the form of their files; None if memory cannot hold them in this form.
        `file_seconds` is the time to write the files. Without it, "auto" may not choose yet.
        """
        if self._is_chosen is not None:
            return
        obstacle = self._obstacle or ("saving splits or joins tensors" if stored is None else None)
        if self._transport == "files":
            self._use_files(_SET)
        elif stored is None or obstacle is not None:
            level = logging.WARNING if self._transport == "broadcast" else logging.INFO
            self._use_files(obstacle or "", level=level)
        elif self._transport == "broadcast":
            self._is_chosen = True
        elif file_seconds is not None:
            self._is_chosen, self._file_seconds = True, file_seconds
            self._check_route("shared memory" if stored.shared else "broadcast", stored.size)

    def _use_files(self, reason: str, *, level: int = logging.INFO) -> None:
        self._is_chosen = False
        logger.log(level, "Engines get new weights by files: %s", reason)

    def _check_route(self, route: str, size: int) -> None:
        """Use files from now on if they are faster than this route."""
        estimate = _SETUP_SECONDS[route] + size / _BYTES_PER_SECOND[route]
        self._reason = f"writing files takes {self._file_seconds:.2f} s, and {route} about {estimate:.2f} s"
        if self._file_seconds <= estimate:
            self._use_files(self._reason)

    @property
    def is_used(self) -> bool:
        """True if new weights are offered from memory."""
        return bool(self._is_chosen) and self._failures < _MAX_FAILURES

    def take_seconds(self) -> float | None:
        """Return the seconds from the last offer to the end of its transfer, once."""
        seconds, self._seconds = self._seconds, None
        return seconds

    def offer(self, manifest: WeightsManifest, stored: StoredWeights) -> None:
        """Offer weights, and start a thread that sends them if the offer is accepted.

        Until `finish`, the values of `stored` must not change.
        """
        sizes = {name: file.nbytes for name, file in stored.files.items()}
        try:
            offer = offer_weights(self._run, manifest, sizes, stored.shared)
        except OSError as error:
            self._fail(manifest.step, error)
            return
        fault_point("broadcast.offer")
        self._withdrawn.clear()
        # a daemon: a broadcast must not delay the end of the process
        self._thread = threading.Thread(
            target=self._serve, args=(offer, stored), name="broadcast", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Withdraw the offer if it is not accepted, else wait until the transfer has ended or failed."""
        if self._thread is not None:
            self._withdrawn.set()
            self._thread.join()
            self._thread = None

    def _serve(self, offer: WeightsOffer, stored: StoredWeights) -> None:
        began = time.monotonic()
        try:
            group = self._wait_accepted(offer)
            if group is None:
                return
            self._send(offer, group, stored)
            self._failures = 0
            self._seconds = time.monotonic() - began
        except Exception as error:  # torch raises several types
            self._fail(offer.manifest.step, error)

    def _fail(self, step: int, error: Exception) -> None:
        self._failures += 1
        logger.debug("Transfer of weights %d failed: %s", step, first_line(error))
        if self._failures == _MAX_FAILURES:
            logger.warning(
                "Engines get new weights by files from now on: %d transfers in a row failed, the last: %s",
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

    def _send(self, offer: WeightsOffer, accepted: AcceptedGroup, stored: StoredWeights) -> None:
        group = BroadcastGroup(
            store_path(self._run, offer.store),
            0,
            accepted.size,
            loopback=accepted.loopback,
            seconds=broadcast_seconds(offer.sizes),
        )
        fault_point("broadcast.send")
        is_shared = accepted.loopback and bool(stored.shared)
        if not is_shared:
            group.transfer(stored.files)
        fault_point("broadcast.sent")
        group.finish()
        self._report_route("shared memory" if is_shared else "broadcast", stored.size)

    def _report_route(self, route: str, size: int) -> None:
        """Log the route of the first transfer, and check that it is faster than files."""
        if route == self._route:
            return
        self._route = route
        self._check_route(route, size)
        if self._is_chosen:
            reason = _SET if self._transport == "broadcast" else self._reason
            logger.info("Engines get new weights by %s: %s", route, reason)
