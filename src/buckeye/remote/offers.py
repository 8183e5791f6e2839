"""Filter the offers of a provider by the request of the user, sort them by price, and show them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from buckeye.base.columns import align_columns, counted
from buckeye.errors import RemoteError, UsageError
from buckeye.launch.preflight.devices import GpuSpec
from buckeye.remote.base import Offer, RemoteRequest
from buckeye.remote.providers.prime import PrimeProvider


def find_offers(
    provider: PrimeProvider, request: RemoteRequest, *, disk_gb: int
) -> tuple[list[Offer], Counter[str]]:
    """Return the offers that fit the request, cheapest first, and the number of other offers by reason.

    Raises RemoteError, with the reasons, if no offer fits.
    """
    gpus = request.gpus
    if gpus is None or not gpus.type:
        raise UsageError(
            f"--provider {provider.name} needs --gpus",
            code="BK-CLI-MISSING",
            hint="add the GPUs, as in --gpus 2xA100",
        )
    offers = provider.offers(gpus, disk_gb=disk_gb)
    reasons = {id(offer): _reason(offer, gpus, request) for offer in offers}
    fitting = [offer for offer in offers if reasons[id(offer)] is None]
    left_out = Counter(reason for reason in reasons.values() if reason is not None)
    if not fitting:
        raise RemoteError(_nothing_fits(provider, gpus, request, offers, left_out), code="BK-OFFER-NONE")
    return sorted(fitting, key=_order), left_out


def confirm_price(offer: Offer) -> bool:
    """Ask the user on the terminal whether to rent this offer. Raises UsageError without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            f"cannot ask for confirmation of the price, {price_text(offer)}: not a terminal",
            code="BK-CLI-CONFIRM",
            hint="add --yes to confirm it, and --max-price to limit it",
        )
    answer = input(f"Rent {offer.gpus} from {offer.cloud} for {price_text(offer)}? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def price_text(offer: Offer) -> str:
    """Return the price as text: `$7.99 an hour`."""
    return f"${offer.price_per_hour:.2f} an hour"


def offer_table(offers: Sequence[Offer], *, limit: int = 10) -> str:
    """Return the first `limit` offers as an aligned table."""
    rows = [("", "GPUs", "$/h", "from", "region", "place", "disk", "socket", "security")]
    for number, offer in enumerate(offers[:limit], 1):
        rows.append(
            (
                str(number),
                str(offer.gpus),
                f"{offer.price_per_hour:.2f}",
                offer.cloud,
                offer.region or "?",
                offer.location or "?",
                f"{offer.disk_gb} GB",
                offer.socket or "?",
                (offer.security or "?").removesuffix("_cloud"),
            )
        )
    lines = [align_columns(rows)]
    if len(offers) > limit:
        lines.append(f"({len(offers) - limit} more offers, at the same or a higher price)")
    return "\n".join(lines)


def left_out_text(left_out: Counter[str]) -> str:
    """Return the number of offers by reason, such as `3 is not in stock; 1 is in EU`, or "" without any."""
    return "; ".join(f"{count} {reason}" for reason, count in left_out.most_common())


def _reason(offer: Offer, gpus: GpuSpec, request: RemoteRequest) -> str | None:
    """Return the reason why an offer does not fit the request, or None if it fits."""
    if offer.gpus.type != gpus.type:
        return f"has {offer.gpus.type}"
    if offer.gpus.count != gpus.count:
        return f"has {counted(offer.gpus.count, 'GPU')}"
    if request.region and not _is_in(offer, request.region):
        return f"is in {offer.region or 'an unknown region'}"
    if offer.unfit is not None:
        return offer.unfit
    if request.max_price is not None and offer.price_per_hour > request.max_price:
        return f"costs more than --max-price {request.max_price:g}"
    return None


def _is_in(offer: Offer, regions: Sequence[str]) -> bool:
    places = {word.strip().lower() for word in (offer.region or "", *(offer.location or "").split(","))}
    return any(region.lower() in places for region in regions)


def _order(offer: Offer) -> tuple[float, bool, str, str]:
    return (
        offer.price_per_hour,
        offer.security != "secure_cloud",
        offer.cloud,
        str(offer.row.get("cloudId")),
    )


def _nothing_fits(
    provider: PrimeProvider,
    gpus: GpuSpec,
    request: RemoteRequest,
    offers: Sequence[Offer],
    left_out: Counter[str],
) -> str:
    if not offers:
        return (
            f"{provider.name} offers no {gpus.type} now. Try another type, or later; "
            "`prime availability list` shows all available GPUs."
        )
    message = (
        f"{provider.name} offers no {gpus} that fits: of {len(offers)} offers, {left_out_text(left_out)}."
    )
    right = [offer for offer in offers if str(offer.gpus) == str(gpus) and offer.unfit is None]
    if request.max_price is not None and right:
        cheapest = min(right, key=_order)
        message += f" The cheapest costs {price_text(cheapest)} (--max-price), in {cheapest.region}."
    return message
