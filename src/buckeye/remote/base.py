"""Types of remote training: request, offer, pod, and the protocol of a provider."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

NAME_PREFIX = "buckeye-"
"""Prefix of the name of each pod that Buckeye creates."""

PodState = Literal["starting", "ready", "failed", "ending", "gone"]
"""`ready`: it has an address for ssh. `failed`: it will never be ready, and may cost all the same. `gone`:
the provider does not know it, or has ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Time, so that a wait of half an hour can be tested in no time. `now` is in seconds since the epoch."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRequest:
    """`count` GPUs of one type in one machine. `type` is the full name, `H100_80GB`."""

    count: int
    type: str

    def __str__(self) -> str:
        return f"{self.count}x{self.type}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRequest:
    """Machine, price and time of a remote run. Prices are in US dollars an hour for the whole machine."""

    gpus: GpuRequest | None = None
    """None for hosts, whose GPUs are fixed."""
    provider: Literal["prime", "ssh"] = "prime"
    hosts: tuple[str, ...] = ()
    """`[user@]host[:port]`, for the provider `ssh`."""
    max_price: float | None = None
    """Highest price of the machine, per hour."""
    max_hours: float | None = None
    """Hours until the pod is ended, even if the run is not finished."""
    keep: bool = False
    """Leave the pod running at the end. It continues to cost."""
    yes: bool = False
    """The price is confirmed."""
    regions: tuple[str, ...] = ()
    disk_gb: int | None = None
    """None: the estimate for the run."""
    identity_file: Path | None = None
    """Private key for ssh; None: an existing one, else a new one."""

    def flags(self) -> list[str]:
        """Return the flags of `buckeye rl` that ask for this."""
        values: dict[str, Sequence[object]] = {
            "--provider": [self.provider],
            "--host": self.hosts,
            "--region": self.regions,
            "--gpus": [self.gpus],
            "--max-price": [self.max_price],
            "--max-hours": [self.max_hours],
            "--disk-gb": [self.disk_gb],
            "--identity-file": [self.identity_file],
        }
        given = [(name, value) for name, found in values.items() for value in found if value is not None]
        switches = [name for name, is_on in (("--keep", self.keep), ("--yes", self.yes)) if is_on]
        texts = [f"{value:g}" if isinstance(value, float) else str(value) for _, value in given]
        return [w for (name, _), text in zip(given, texts, strict=True) for w in (name, text)] + switches


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A machine that a provider offers.

    `price_per_hour` in US dollars includes `disk_gb`. `unfit` is the reason why the machine cannot be used.
    `row` is the provider's description, which an order repeats.
    """

    provider: str
    gpus: GpuRequest
    price_per_hour: float
    disk_gb: int
    cloud: str
    """Who owns the machine, in the provider's words."""
    region: str | None = None
    location: str | None = None
    socket: str | None = None
    security: str | None = None
    stock: str | None = None
    image: str | None = None
    unfit: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSpec:
    """Details of an order in addition to the offer."""

    name: str
    public_key: str | None = None
    """Key that may log in, as a line of `authorized_keys`; None: the keys of the account."""
    max_price: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SshTarget:
    """Address of a machine for ssh."""

    user: str
    host: str
    port: int = 22

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A machine that was rented.

    `price_per_hour` is what the provider says that it costs; None if it says nothing. `created` is in seconds
    since the epoch.
    """

    id: str
    name: str
    price_per_hour: float | None = None
    gpus: str | None = None
    created: float | None = None
    spot: bool = False
    """It may be taken away at any time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodStatus:
    """State of a pod.

    `detail` is the provider's name of the state, `progress` is from 0 to 1, and `ssh` has one address per
    node. `failure` is the reason why the pod will never be ready.
    """

    state: PodState
    detail: str = ""
    ssh: tuple[SshTarget, ...] = ()
    progress: float | None = None
    price_per_hour: float | None = None
    failure: str | None = None


class Provider(Protocol):
    """A source of machines.

    Each call has a deadline. It raises RemoteError with the request, the reply and what to do. Calls block
    and do not print.
    """

    name: str
    is_rental: bool
    """Whether it creates and ends machines, and they cost."""
    ssh_key_path: Path | None
    """The private key that the account is set up with; None if that is not known."""

    def offers(self, gpus: GpuRequest, *, disk_gb: int) -> list[Offer]:
        """Return the machines with GPUs of the type, in any number, and at least `disk_gb` of disk.

        They are in no order, and include unfit machines.
        """
        ...

    def create(self, offer: Offer, spec: PodSpec) -> Pod:
        """Order the machine.

        Raises OfferRefusedError if another offer might be accepted, and leaves no pod behind then.
        """
        ...

    def status(self, pod_id: str) -> PodStatus:
        """Return the state of a pod; one that does not exist is `gone`."""
        ...

    def terminate(self, pod_id: str) -> None:
        """Order the end of a pod; that it is over, `status` says. For one that is gone, nothing happens."""
        ...

    def pods(self) -> list[Pod]:
        """The pods whose names begin with NAME_PREFIX and that may cost."""
        ...
