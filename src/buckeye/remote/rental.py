"""Rent a pod, wait until it is ready, and end it after use in every case."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.errors import OfferRefusedError, PodGoneError, RemoteError, UsageError, first_line
from buckeye.remote.base import NAME_PREFIX, Offer, PodStatus, RemoteRequest, SshTarget
from buckeye.remote.connection import find_private_key, parse_target, public_key
from buckeye.remote.ledger import Ledger, PodEntry, hours_text
from buckeye.remote.offers import confirm_price, find_offers, left_out_text, offer_table, price_text
from buckeye.remote.providers.prime import PrimeProvider
from buckeye.remote.teardown import cost_text, end_pod, interrupt_on_signals, still_running_text

_READY_SECONDS = 1800.0  # 5 to 20 minutes are usual
_POLL_SECONDS = 8.0
_TELL_SECONDS = 60.0
_UNSEEN_SECONDS = 120.0  # some servers of the provider may not know a new pod for this time
_PRICE_TOLERANCE = 1.02  # ratio: prices are rounded, and providers count disks differently
_MOST_OFFERS = 8
_DEAD_MAN_VARIABLE = "BUCKEYE_DEAD_MAN_MINUTES"
_DEAD_MAN_MINUTES = 30.0
_GRACE_SECONDS = 900.0

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A pod that is ready, or a host of the user.

    A pod is ended when the context of `rent_pod` ends. Times are in seconds since the epoch.
    """

    name: str
    ssh: tuple[SshTarget, ...]
    identity_file: Path | None
    """File with the private key for ssh. None: the default keys of ssh."""
    known_hosts: Path
    """File for the host keys of the ssh server of the machine."""
    started: float
    expires: float | None
    """Time when `max_hours` have passed, or None without a limit."""
    id: str = ""
    """Id of the pod. Empty for a host."""
    provider: PrimeProvider | None = field(default=None, repr=False)
    """Provider of the pod; None for a host."""

    def dead_man_timer(self, minutes: float) -> dict[str, Any]:
        """Return the settings of `pod.watchdog`, which ends a run that no local process supervises."""
        provider = self.provider
        return {
            "seconds": 60 * minutes,
            "expires": self.expires,
            "grace": _GRACE_SECONDS,
            "machine": None if provider is None else {"url": provider.pod_url(self.id)},
        }

    def check(self) -> None:
        """Raise PodGoneError if the provider has ended the pod, RemoteError if `max_hours` have passed."""
        if self.expires is not None and time.time() >= self.expires:
            used = hours_text((time.time() - self.started) / 3600)
            raise RemoteError(
                f"--max-hours has passed: pod {self.name} has run for {used}", code="BK-POD-GONE"
            )
        status = self.provider.status(self.id) if self.provider is not None else PodStatus(state="ready")
        if status.state in ("gone", "ending", "failed"):
            raise PodGoneError(f"pod {self.name} is {status.state}: {status.failure or status.detail}")


def dead_man_minutes() -> float:
    """Return the minutes without a heartbeat after which the watchdog ends a job.

    Raises UsageError for an invalid value of BUCKEYE_DEAD_MAN_MINUTES.
    """
    text = os.environ.get(_DEAD_MAN_VARIABLE, str(_DEAD_MAN_MINUTES))
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 60 * 24 * 7:
        raise UsageError(
            f"{_DEAD_MAN_VARIABLE}={text} is not a number of minutes", code="BK-CONFIG-VALUE", hint="write 30"
        )
    return minutes


def host_target(hosts: Sequence[str]) -> SshTarget:
    """Parse the first host of the user, `[user@]host[:port]`. Raises UsageError for an invalid address."""
    if not hosts:
        raise UsageError(
            "--provider ssh needs --host", code="BK-CLI-MISSING", hint="add --host user@host[:port]"
        )
    try:
        return parse_target(hosts[0])
    except ValueError as error:
        hint = "write --host user@host or --host user@host:port"
        raise UsageError(str(error), code="BK-CLI-ARGUMENT", at="--host", hint=hint) from None


def own_host(request: RemoteRequest, *, run_id: str) -> Machine:
    """Return the host of the user as a machine that Buckeye neither rents nor ends."""
    now = time.time()
    return Machine(
        name=f"{NAME_PREFIX}{run_id}",
        ssh=(host_target(request.host),),
        identity_file=request.identity_file,
        known_hosts=Ledger().known_hosts("hosts"),
        started=now,
        expires=_expiry(request, now),
    )


@contextmanager
def rent_pod(
    provider: PrimeProvider,
    request: RemoteRequest,
    *,
    run_id: str,
    disk_gb: int,
    tell: Tell,
) -> Iterator[Machine]:
    """Rent the cheapest machine that fits, wait until it is ready, and end it when the context ends.

    The context may end normally, by an error, or by Ctrl-C, SIGTERM or SIGHUP. With `request.keep`, a pod
    that was ready is not ended.

    `disk_gb` is the disk size that the run needs. The user confirms the price, unless `request.yes` is set.
    If the provider rejects an offer, if the pod costs more than the offer, or if the pod fails, the next
    offer is tried. `tell` gets messages for the user. The last message has the cost. Raises RemoteError if no
    offer works.
    """
    ledger = Ledger()
    rental = _Rental(
        name=f"{NAME_PREFIX}{run_id}-{secrets.token_hex(2)}",
        run_id=run_id,
        provider=provider,
        request=request,
        disk_gb=disk_gb if request.disk_gb is None else request.disk_gb,
        identity=find_private_key(request.identity_file, provider.ssh_key_path, ledger.folder.parent),
        tell=tell,
        ledger=ledger,
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
    provider: PrimeProvider
    request: RemoteRequest
    disk_gb: int
    identity: Path
    tell: Tell
    ledger: Ledger
    entry: PodEntry | None = None
    """Record of the last order."""
    confirmed: float | None = None
    """Highest price that the user has confirmed."""
    ready: bool = False

    def rent(self) -> Machine:
        """Try the offers, cheapest first, and return the first pod that is ready and matches its offer."""
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

        If the run has `failed`, an error at the end of the pod is only reported, so that it does not hide the
        error of the run.
        """
        if self.entry is None or self.entry.ended is not None:
            return
        if self.request.keep and self.ready:
            entry = self._record(outcome=outcome, keep=True)
            self.tell(f"{cost_text(entry, time.time())}; kept; {still_running_text(entry)}")
            return
        try:
            self.tell(f"Ending pod {self.name} ...")
            self._end(self.entry, outcome)
        except RemoteError as error:
            if not failed:
                raise
            self.tell(f"error: {error}")
        except KeyboardInterrupt:
            if self.entry.ended is None:
                raise

    def _offers(self) -> Sequence[Offer]:
        offers, left_out = find_offers(self.provider, self.request, disk_gb=self.disk_gb)
        self.tell(offer_table(offers))
        if left_out:
            self.tell(f"Left out: {left_out_text(left_out)}")
        return offers

    def _ask(self, offer: Offer) -> None:
        """Ask the user to confirm the price, unless the user has confirmed an equal or higher price.

        `--yes` confirms `--max-price`. Without `--max-price`, it confirms the price of the first offer.
        """
        if self.confirmed is not None and offer.price_per_hour <= self.confirmed:
            return
        if not self.request.yes:
            if not confirm_price(offer):
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

    def _try(self, offer: Offer) -> Machine:
        """Record the order, send it, and wait until its pod is ready."""
        key = public_key(self.identity)
        now = time.time()
        self.entry = PodEntry(
            name=self.name,
            run_id=self.run_id,
            provider=self.provider.name,
            gpus=str(offer.gpus),
            price_per_hour=offer.price_per_hour,
            ordered=now,
            identity_file=str(self.identity),
            expires=_expiry(self.request, now),
        )
        self._record()
        pod = self.provider.create(offer, self.name, public_key=key, max_price=self.request.max_price)
        entry = self._record(
            pod_id=pod.id, price_per_hour=max(offer.price_per_hour, pod.price_per_hour or 0.0)
        )
        self.tell(
            f"Ordered {offer.gpus} from {offer.cloud} for {price_text(offer)}: pod {self.name} ({pod.id})"
        )
        self._check_matches(offer, pod.price_per_hour, spot=pod.spot)
        status = self._wait_ready(offer, pod.id, entry.expires)
        self._end_others(pod.id)
        entry = self._record(ssh=tuple(map(str, status.ssh)))
        self.ready = True
        return Machine(
            name=self.name,
            id=pod.id,
            ssh=status.ssh,
            identity_file=self.identity,
            known_hosts=self.ledger.known_hosts(self.name),
            started=entry.ordered,
            expires=entry.expires,
            provider=self.provider,
        )

    def _wait_ready(self, offer: Offer, pod_id: str, expires: float | None) -> PodStatus:
        """Wait until a pod is ready: for at most half an hour, and not longer than `expires`.

        Raises PodGoneError if the pod will never be ready, OfferRefusedError if it does not match the offer,
        and other RemoteError if the wait is too long.
        """
        started = told = time.monotonic()
        shown, seen = "", False
        while True:
            status, now = self.provider.status(pod_id), time.monotonic()
            waited = now - started
            seen = seen or status.state != "gone"
            self._check_matches(offer, status.price_per_hour, spot=False)
            if status.state == "ready":
                self.tell(f"Pod {self.name} is ready after {hours_text(waited / 3600)}.")
                return status
            is_lost = status.state == "gone" and (seen or waited > _UNSEEN_SECONDS)
            if is_lost or status.state in ("failed", "ending"):
                raise PodGoneError(f"pod {pod_id} will never be ready: {status.failure or status.detail}")
            percent = "" if status.progress is None else f" {status.progress:.0%}"
            text = f"{status.detail or status.state}{percent}"
            if text != shown or now - told >= _TELL_SECONDS:
                self.tell(f"Waiting for the pod: {text}, {waited / 60:.0f} min (5 to 20 are usual)")
                shown, told = text, now
            if waited >= _READY_SECONDS:
                message = f"pod {self.name} is not ready after {waited / 60:.0f} minutes: {text}"
                raise RemoteError(message, code="BK-POD-GONE")
            if expires is not None and time.time() >= expires:
                message = f"--max-hours has passed, and pod {self.name} is not ready: {text}"
                raise RemoteError(message, code="BK-POD-GONE")
            time.sleep(_POLL_SECONDS)

    def _check_matches(self, offer: Offer, price: float | None, *, spot: bool) -> None:
        """Raise OfferRefusedError if a pod does not match the offer, or costs more than `--max-price`."""
        limit = self.request.max_price
        if price is not None and price > offer.price_per_hour * _PRICE_TOLERANCE + 0.01:
            raise OfferRefusedError(f"its pod costs ${price:.2f} an hour, not {price_text(offer)}")
        if price is not None and limit is not None and price > limit:
            raise OfferRefusedError(f"its pod costs ${price:.3f} an hour, more than --max-price {limit:g}")
        if spot:
            raise OfferRefusedError("its pod is a spot machine, which was not offered")

    def _record(self, **changes: Any) -> PodEntry:
        """Change fields of the record of the pod, and write it to the ledger.

        If the ledger cannot be written, the changed record remains in memory.
        """
        assert self.entry is not None
        self.entry = dataclasses.replace(self.entry, **changes)
        return self.ledger.write(self.entry)

    def _give_up(self, outcome: str) -> None:
        """Record the end of a failed order. If the order created a pod, end the pod."""
        assert self.entry is not None
        if self.entry.pod_id is None:
            self.entry = self.ledger.end(self.entry, outcome=outcome)
        else:
            self._end(self.entry, outcome)

    def _end_others(self, pod_id: str) -> None:
        """End other pods of this rental. An order without a response may have created one."""
        for pod in self.provider.pods():
            if pod.name == self.name and pod.id != pod_id:
                self.tell(f"An order without a response has created a second pod, {pod.id}. Ending it.")
                self.provider.terminate(pod.id)

    def _end(self, entry: PodEntry, outcome: str) -> None:
        """End the pod. If Ctrl-C was pressed, raise KeyboardInterrupt after the pod has ended."""
        self.entry, is_interrupted = end_pod(
            self.provider, self.ledger, entry, outcome=outcome, tell=self.tell
        )
        self.tell(f"{cost_text(self.entry, time.time())}. The pod is gone.")
        if is_interrupted:
            raise KeyboardInterrupt


def _expiry(request: RemoteRequest, now: float) -> float | None:
    return None if request.max_hours is None else now + request.max_hours * 3600


def _outcome(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"failed: {first_line(error)[:200]}"
