"""The life of a pod: rented, waited for, lent to whoever trains on it, and ended however that goes."""

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
from buckeye.remote.connection import private_key, public_key
from buckeye.remote.ledger import Entry, Ledger, hours_text
from buckeye.remote.offers import fitting_offers, left_out_text, offer_table, price_text
from buckeye.remote.pod_ready import check_word, wait_ready
from buckeye.remote.teardown import cost_text, end_pod, left_text, signals_interrupt

READY_SECONDS = 1800.0
"""How long a pod may take to be ready, unless it is said otherwise. It usually takes 5 to 20 minutes."""

_MOST_OFFERS = 8

Tell = Callable[[str], None]
Confirm = Callable[[Offer], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class RentedPod:
    """A pod that is ready, while its context lasts. Times are in seconds since the epoch."""

    name: str
    id: str
    ssh: tuple[SshTarget, ...]
    identity_file: Path | None
    """None is what ssh takes by itself."""
    known_hosts: Path
    """Where the keys of its ssh server are to be kept."""
    price_per_hour: float
    started: float
    expires: float | None
    """When `max_hours` are over."""
    provider: Provider = field(repr=False)
    clock: Clock = field(repr=False)

    def hours(self) -> float:
        """How long it has been paid for."""
        return (self.clock.now() - self.started) / 3600

    def cost(self) -> float:
        """What it has cost so far, in US dollars."""
        return self.hours() * self.price_per_hour

    def check(self) -> None:
        """Raise PodGoneError if the provider has ended it, RemoteError if its hours are over."""
        if self.expires is not None and self.clock.now() >= self.expires:
            raise RemoteError(f"--max-hours is over: pod {self.name} has run for {hours_text(self.hours())}.")
        status = self.provider.status(self.id)
        if status.state in ("gone", "ending", "failed"):
            raise PodGoneError(f"Pod {self.name} is {status.state}: {status.failure or status.detail}.")


@contextmanager
def rented(
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
    """Rent the cheapest machine that fits, wait until it is ready, and end it when the context ends: by
    itself, by an error, by Ctrl-C, SIGTERM or SIGHUP. With `request.keep` it stays then, if it was ready.

    `disk_gb` is what the run needs. `confirm(offer)` is asked before anything is ordered, unless
    `request.yes`. An offer that is refused, that costs more than it said, or whose pod fails gives way to the
    next. `tell` gets one text after another for the user; the last one is the cost. Raises RemoteError.
    """
    clock, ledger = clock or Clock(), ledger or Ledger()
    if not provider.rents:
        yield _borrowed(provider, request, run_id, clock, ledger)
        return
    rental = _Rental(
        name=f"{NAME_PREFIX}{run_id}-{secrets.token_hex(2)}",
        run_id=run_id,
        provider=provider,
        request=request,
        disk_gb=disk_gb if request.disk_gb is None else request.disk_gb,
        identity=private_key(request.identity_file, provider.ssh_key_path, ledger.folder.parent),
        confirm=confirm,
        tell=tell,
        clock=clock,
        ledger=ledger,
        timeout=timeout,
    )
    with ledger.looked_after(rental.name), signals_interrupt():
        try:
            yield rental.rent()
        except BaseException as error:
            rental.finish(_outcome(error), failed=True)
            raise
        rental.finish("finished", failed=False)


@dataclass(kw_only=True, slots=True)
class _Rental:
    """One pod's way from the offers to its end."""

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
    entry: Entry | None = None
    """What was ordered last."""
    confirmed: float | None = None
    """The highest price that the user has agreed to."""
    ready: bool = False

    def rent(self) -> RentedPod:
        """A pod that is ready, of the first offer that keeps its word."""
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
            f"None of {len(refusals)} offers became a pod. The last one: {refusals[-1]} Nothing is rented."
        )

    def finish(self, outcome: str, *, failed: bool) -> None:
        """End the pod, or leave it where that was asked for, and say what it has cost. An error here is told
        and not raised where there is another one."""
        if self.entry is None or self.entry.ended is not None:
            return
        if self.request.keep and self.ready:
            self._record(outcome=outcome, keep=True)
            self.tell(f"{cost_text(self.entry, self.clock.now())}; kept. {left_text(self.entry)}")
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
        fitting = fitting_offers(self.provider, self.request, disk_gb=self.disk_gb)
        self.tell(offer_table(fitting.offers))
        if fitting.left_out:
            self.tell(f"Left out: {left_out_text(fitting.left_out)}")
        return fitting.offers

    def _ask(self, offer: Offer) -> None:
        """Have the price confirmed; one that is no higher than a confirmed one is. `--yes` confirms
        `--max-price`, and without that the price of the first offer: nobody has seen what comes after it."""
        if self.confirmed is not None and offer.price_per_hour <= self.confirmed:
            return
        if not self.request.yes:
            if not self.confirm(offer):
                raise RemoteError("The price was not confirmed. Nothing is rented.")
            self.confirmed = offer.price_per_hour
        elif self.confirmed is None:
            self.confirmed = self.request.max_price or offer.price_per_hour
        else:
            raise RemoteError(
                f"The next offer costs {price_text(offer)}, and --yes has confirmed ${self.confirmed:.2f}. "
                f"Nothing is rented. To go on up to a price, add --max-price {offer.price_per_hour:.2f}."
            )

    def _try(self, offer: Offer) -> RentedPod:
        """Write down what is going to be ordered, order it, and wait for it."""
        key = public_key(self.identity)
        now, hours = self.clock.now(), self.request.max_hours
        self.entry = Entry(
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
        check_word(offer, pod.price_per_hour, spot=pod.spot, limit=self.request.max_price)
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

    def _record(self, **changes: Any) -> Entry:
        """Write down what has changed. It is known here even if it cannot be written."""
        assert self.entry is not None
        self.entry = dataclasses.replace(self.entry, **changes)
        return self.ledger.write(self.entry)

    def _give_up(self, outcome: str) -> None:
        """Leave an offer: a pod that came of it is ended."""
        assert self.entry is not None
        if self.entry.pod_id is None:
            self.entry = self.ledger.end(self.entry, outcome=outcome, now=self.clock.now())
        else:
            self._end(outcome)

    def _end_others(self, pod_id: str) -> None:
        """End what an order that was not answered has made all the same."""
        for pod in self.provider.pods():
            if pod.name == self.name and pod.id != pod_id:
                self.tell(f"An order that was not answered has made a second pod, {pod.id}: it is ended.")
                self.provider.terminate(pod.id)

    def _end(self, outcome: str) -> None:
        """End the pod. Raises KeyboardInterrupt if the user has asked for that meanwhile, also when it is
        ended."""
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
    """Hosts, which are there before and after."""
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
