"""The life of a pod: rent it, wait for it, use it for training, and end it in every case."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.errors import OfferRefusedError, PodGoneError, RemoteError
from buckeye.remote.base import (
    NAME_PREFIX,
    Clock,
    GpuRequest,
    Offer,
    PodSpec,
    Provider,
    RemoteRequest,
    SshTarget,
)
from buckeye.remote.connection import find_private_key, public_key
from buckeye.remote.ledger import Ledger, PodEntry, hours_text
from buckeye.remote.offers import find_offers, left_out_text, offer_table, price_text
from buckeye.remote.pod_ready import check_matches_offer, wait_ready
from buckeye.remote.teardown import cost_text, end_pod, interrupt_on_signals, still_running_text

READY_SECONDS = 1800.0
"""Default limit for a pod to become ready; 5 to 20 minutes are usual."""

_MOST_OFFERS = 8

Tell = Callable[[str], None]
Confirm = Callable[[Offer], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class RentedPod:
    """A pod that is ready, as long as its context lasts. Times are in seconds since the epoch."""

    name: str
    id: str
    ssh: tuple[SshTarget, ...]
    identity_file: Path | None
    """None means ssh's default keys."""
    known_hosts: Path
    """File for the keys of its ssh server."""
    price_per_hour: float
    started: float
    expires: float | None
    """Time when `max_hours` are over, or None."""
    provider: Provider = field(repr=False)
    clock: Clock = field(repr=False)

    def hours(self) -> float:
        """Return the billed hours so far."""
        return (self.clock.now() - self.started) / 3600

    def cost(self) -> float:
        """Return the cost so far, in US dollars."""
        return self.hours() * self.price_per_hour

    def check(self) -> None:
        """Raise PodGoneError if the provider has ended it, RemoteError if its hours are over."""
        if self.expires is not None and self.clock.now() >= self.expires:
            raise RemoteError(
                f"--max-hours has passed: pod {self.name} has run for {hours_text(self.hours())}",
                code="BK-POD-GONE",
            )
        status = self.provider.status(self.id)
        if status.state in ("gone", "ending", "failed"):
            raise PodGoneError(f"pod {self.name} is {status.state}: {status.failure or status.detail}")


@contextmanager
def rent_pod(
    provider: Provider,
    request: RemoteRequest,
    *,
    run_id: str,
    disk_gb: int,
    confirm: Confirm,
    tell: Tell,
    clock: Clock | None = None,
    ledger: Ledger | None = None,
    timeout: float = READY_SECONDS,
) -> Iterator[RentedPod]:
    """Rent the cheapest machine that fits, wait until it is ready, and end it when the context ends.

    The context may end normally, by an error, or by Ctrl-C, SIGTERM or SIGHUP. With `request.keep` a pod that
    was ready is kept.

    `disk_gb` is the disk size that the run needs. `confirm(offer)` is called before every order, unless
    `request.yes`. If an offer is rejected, costs more than announced, or its pod fails, the next one is
    tried. `tell` gets messages for the user; the last one is the cost. Raises RemoteError.
    """
    clock, ledger = clock or Clock(), ledger or Ledger()
    if not provider.is_rental:
        yield _borrowed(provider, request, run_id, clock, ledger)
        return
    rental = _Rental(
        name=f"{NAME_PREFIX}{run_id}-{secrets.token_hex(2)}",
        run_id=run_id,
        provider=provider,
        request=request,
        disk_gb=disk_gb if request.disk_gb is None else request.disk_gb,
        identity=find_private_key(request.identity_file, provider.ssh_key_path, ledger.folder.parent),
        confirm=confirm,
        tell=tell,
        clock=clock,
        ledger=ledger,
        timeout=timeout,
    )
    with ledger.mark_supervised(rental.name), interrupt_on_signals():
        try:
            yield rental.rent()
        except BaseException as error:
            rental.finish(_outcome(error), failed=True)
            raise
        rental.finish("finished", failed=False)


@dataclass(kw_only=True, slots=True)
class _Rental:
    """One rental, from the offers to the end of the pod."""

    name: str
    run_id: str
    provider: Provider
    request: RemoteRequest
    disk_gb: int
    identity: Path
    confirm: Confirm
    tell: Tell
    clock: Clock
    ledger: Ledger
    timeout: float
    entry: PodEntry | None = None
    """The last order."""
    confirmed: float | None = None
    """The highest price that the user has confirmed."""
    ready: bool = False

    def rent(self) -> RentedPod:
        """Return a ready pod from the first offer that turns out as announced."""
        offers = self._offers()
        refusals = []
        for offer in offers[:_MOST_OFFERS]:
            self._ask(offer)
            try:
                return self._try(offer)
            except (OfferRefusedError, PodGoneError) as error:
                self.tell(f"{offer.cloud} at {price_text(offer)}: {error}")
                refusals.append(str(error))
                self._give_up("refused")
        raise RemoteError(
            f"none of {len(refusals)} offers became a pod; nothing is rented. Last reason: {refusals[-1]}",
            code="BK-OFFER-NONE",
        )

    def finish(self, outcome: str, *, failed: bool) -> None:
        """End the pod, or keep it if requested, and report its cost.

        After a failure, an error here is only reported, so that it does not hide the first one.
        """
        if self.entry is None or self.entry.ended is not None:
            return
        if self.request.keep and self.ready:
            self._record(outcome=outcome, keep=True)
            self.tell(f"{cost_text(self.entry, self.clock.now())}; kept; {still_running_text(self.entry)}")
            return
        try:
            self.tell(f"Ending pod {self.name} ...")
            self._end(outcome)
        except RemoteError as error:
            if not failed:
                raise
            self.tell(f"error: {error}")
        except KeyboardInterrupt:
            if self.entry.ended is None:
                raise

    def _offers(self) -> Sequence[Offer]:
        fitting = find_offers(self.provider, self.request, disk_gb=self.disk_gb)
        self.tell(offer_table(fitting.offers))
        if fitting.left_out:
            self.tell(f"Left out: {left_out_text(fitting.left_out)}")
        return fitting.offers

    def _ask(self, offer: Offer) -> None:
        """Have the price confirmed, unless it is at most a confirmed one.

        `--yes` confirms `--max-price`, or without that the price of the first offer, because the user has
        seen no later ones.
        """
        if self.confirmed is not None and offer.price_per_hour <= self.confirmed:
            return
        if not self.request.yes:
            if not self.confirm(offer):
                raise RemoteError("the price was not confirmed; nothing is rented", code="BK-CLI-CONFIRM")
            self.confirmed = offer.price_per_hour
        elif self.confirmed is None:
            self.confirmed = self.request.max_price or offer.price_per_hour
        else:
            raise RemoteError(
                f"the next offer costs {price_text(offer)}, and --yes has confirmed ${self.confirmed:.2f}; "
                "nothing is rented",
                code="BK-OFFER-NONE",
                hint=f"to accept higher prices, add --max-price {offer.price_per_hour:.2f}",
            )

    def _try(self, offer: Offer) -> RentedPod:
        """Record the order, place it, and wait for its pod."""
        key = public_key(self.identity)
        now, hours = self.clock.now(), self.request.max_hours
        self.entry = PodEntry(
            name=self.name,
            run_id=self.run_id,
            provider=self.provider.name,
            gpus=str(offer.gpus),
            price_per_hour=offer.price_per_hour,
            ordered=now,
            identity_file=str(self.identity),
            expires=None if hours is None else now + hours * 3600,
        )
        self._record()
        spec = PodSpec(name=self.name, public_key=key, max_price=self.request.max_price)
        pod = self.provider.create(offer, spec)
        entry = self._record(
            pod_id=pod.id, price_per_hour=max(offer.price_per_hour, pod.price_per_hour or 0.0)
        )
        self.tell(
            f"Ordered {offer.gpus} from {offer.cloud} for {price_text(offer)}: pod {self.name} ({pod.id})"
        )
        check_matches_offer(offer, pod.price_per_hour, spot=pod.spot, limit=self.request.max_price)
        status = wait_ready(
            self.provider,
            entry,
            offer,
            pod.id,
            limit=self.request.max_price,
            clock=self.clock,
            tell=self.tell,
            timeout=self.timeout,
        )
        self._end_others(pod.id)
        entry = self._record(ssh=tuple(map(str, status.ssh)))
        self.ready = True
        return RentedPod(
            name=self.name,
            id=pod.id,
            ssh=status.ssh,
            identity_file=self.identity,
            known_hosts=self.ledger.known_hosts(self.name),
            price_per_hour=entry.price_per_hour,
            started=entry.ordered,
            expires=entry.expires,
            provider=self.provider,
            clock=self.clock,
        )

    def _record(self, **changes: Any) -> PodEntry:
        """Record changes; they are kept in memory even if the ledger cannot be written."""
        assert self.entry is not None
        self.entry = dataclasses.replace(self.entry, **changes)
        return self.ledger.write(self.entry)

    def _give_up(self, outcome: str) -> None:
        """Abandon an order, and end the pod if one was created."""
        assert self.entry is not None
        if self.entry.pod_id is None:
            self.entry = self.ledger.end(self.entry, outcome=outcome, now=self.clock.now())
        else:
            self._end(outcome)

    def _end_others(self, pod_id: str) -> None:
        """End additional pods from orders that had no answer but were carried out."""
        for pod in self.provider.pods():
            if pod.name == self.name and pod.id != pod_id:
                self.tell(f"An order that was not answered has made a second pod, {pod.id}: it is ended.")
                self.provider.terminate(pod.id)

    def _end(self, outcome: str) -> None:
        """End the pod. Raises KeyboardInterrupt if Ctrl-C was pressed meanwhile, even if it has ended."""
        assert self.entry is not None
        ended = end_pod(
            self.provider, self.ledger, self.entry, outcome=outcome, clock=self.clock, tell=self.tell
        )
        self.entry = ended.entry
        self.tell(f"{cost_text(self.entry, self.clock.now())}. The pod is gone.")
        if ended.interrupted:
            raise KeyboardInterrupt


def _borrowed(
    provider: Provider, request: RemoteRequest, run_id: str, clock: Clock, ledger: Ledger
) -> RentedPod:
    """Return the user's own hosts as a pod; they are neither created nor ended."""
    now = clock.now()
    name = f"{NAME_PREFIX}{run_id}"
    offer = Offer(
        provider=provider.name,
        gpus=request.gpus or GpuRequest(count=1, type="any"),
        price_per_hour=0.0,
        disk_gb=0,
        cloud="own",
    )
    pod = provider.create(offer, PodSpec(name=name))
    return RentedPod(
        name=name,
        id=pod.id,
        ssh=provider.status(pod.id).ssh,
        identity_file=request.identity_file,
        known_hosts=ledger.known_hosts("hosts"),
        price_per_hour=0.0,
        started=now,
        expires=None if request.max_hours is None else now + request.max_hours * 3600,
        provider=provider,
        clock=clock,
    )


def _outcome(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"failed: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
