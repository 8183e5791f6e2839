"""Waiting until a pod is ready, with a check that it matches the offer."""

from __future__ import annotations

from collections.abc import Callable

from buckeye.errors import OfferRefusedError, PodGoneError, RemoteError
from buckeye.remote.base import (
    Clock,
    Offer,
    PodStatus,
    Provider,
)
from buckeye.remote.ledger import PodEntry, hours_text
from buckeye.remote.offers import price_text

_POLL_SECONDS = 8.0
_TELL_SECONDS = 60.0
_UNSEEN_SECONDS = 120.0  # a new pod may be unknown to the provider's servers for this time
_PRICE_TOLERANCE = 1.02  # prices are rounded, and providers count disks differently


def wait_ready(
    provider: Provider,
    entry: PodEntry,
    offer: Offer,
    pod_id: str,
    *,
    limit: float | None,
    clock: Clock,
    tell: Callable[[str], None],
    timeout: float,
) -> PodStatus:
    """Wait until a pod has an ssh address, for at most `timeout` seconds and until `entry.expires`.

    `limit` is the maximum price per hour. Raises PodGoneError if the pod will never be ready,
    OfferRefusedError if it does not match the offer, and other RemoteError if the wait is too long.
    """
    started = told = clock.now()
    shown, seen = "", False
    while True:
        status = provider.status(pod_id)
        now = clock.now()
        waited = now - started
        seen = seen or status.state != "gone"
        check_matches_offer(offer, status.price_per_hour, spot=False, limit=limit)
        if status.state == "ready":
            tell(f"Pod {entry.name} is ready after {hours_text(waited / 3600)}.")
            return status
        if _is_lost(status, seen=seen, waited=waited):
            raise PodGoneError(f"pod {pod_id} will never be ready: {status.failure or status.detail}")
        text = _progress_text(status)
        if text != shown or now - told >= _TELL_SECONDS:
            tell(f"Waiting for the pod: {text}, {waited / 60:.0f} min (5 to 20 are usual)")
            shown, told = text, now
        if waited >= timeout:
            raise RemoteError(
                f"pod {entry.name} is not ready after {waited / 60:.0f} minutes: {text}", code="BK-POD-GONE"
            )
        if entry.expires is not None and now >= entry.expires:
            raise RemoteError(
                f"--max-hours has passed, and pod {entry.name} is not ready: {text}", code="BK-POD-GONE"
            )
        clock.sleep(_POLL_SECONDS)


def check_matches_offer(offer: Offer, price: float | None, *, spot: bool, limit: float | None) -> None:
    """Raise OfferRefusedError if a pod does not match the offer, or costs more per hour than `limit`."""
    if price is not None and price > offer.price_per_hour * _PRICE_TOLERANCE + 0.01:
        raise OfferRefusedError(f"its pod costs ${price:.2f} an hour, not {price_text(offer)}")
    if price is not None and limit is not None and price > limit:
        raise OfferRefusedError(f"its pod costs ${price:.3f} an hour, more than --max-price {limit:g}")
    if spot:
        raise OfferRefusedError("its pod is a spot machine, which was not offered")


def _is_lost(status: PodStatus, *, seen: bool, waited: float) -> bool:
    if status.state == "gone":
        return seen or waited > _UNSEEN_SECONDS
    return status.state in ("failed", "ending")


def _progress_text(status: PodStatus) -> str:
    percent = "" if status.progress is None else f" {status.progress:.0%}"
    return f"{status.detail or status.state}{percent}"
