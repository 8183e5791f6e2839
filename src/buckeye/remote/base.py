"""Types of remote training: request, offer and pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from buckeye.launch.preflight.devices import GpuSpec

NAME_PREFIX = "buckeye-"
"""Prefix of the name of each pod that Buckeye creates."""

PodState = Literal["starting", "ready", "failed", "ending", "gone"]
"""State of a pod.

- `starting`: the pod has no address for ssh yet.
- `ready`: the pod has an address for ssh.
- `failed`: the pod will never be ready, but may still cost money.
- `ending`: the provider is ending the pod.
- `gone`: the provider has ended the pod, or does not know it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRequest:
    """Machine, price and time of a remote run. Prices are in US dollars an hour for the whole machine."""

    provider: Literal["prime", "ssh"] = "prime"
    host: tuple[str, ...] = ()
    """`[user@]host[:port]`, for the provider `ssh`."""
    region: tuple[str, ...] = ()
    gpus: GpuSpec | None = None
    """GPUs to rent. None for a host of the user."""
    max_price: float | None = None
    """Maximum price of the machine, in US dollars per hour."""
    max_hours: float | None = None
    """Hours after which the pod is ended, even if the run is not finished."""
    disk_gb: int | None = None
    """Disk size in GB. None: the estimate for the run."""
    identity_file: Path | None = None
    """File with the private key for ssh. None: an existing key, or else a new key."""
    keep: bool = False
    """Leave the pod running when the run ends. The pod then still costs money."""
    yes: bool = False
    """Accept the price without a question."""

    def flags(self) -> list[str]:
        """Return the flags of `buckeye rl` for this request."""
        flags = []
        for option in fields(self):
            name, value = f"--{option.name.replace('_', '-')}", getattr(self, option.name)
            for item in value if isinstance(value, tuple) else (value,):
                if item is True:
                    flags.append(name)
                elif item not in (None, False):
                    flags += [name, f"{item:g}" if isinstance(item, float) else str(item)]
        return flags


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A machine that a provider offers.

    `price_per_hour` in US dollars includes the disk of `disk_gb` GB. `unfit` is the reason why Buckeye cannot
    use the machine, or None. `row` is the description from the provider, which an order repeats.
    """

    gpus: GpuSpec
    price_per_hour: float
    disk_gb: int
    cloud: str
    """Company that owns the machine, such as `runpod`."""
    region: str | None = None
    location: str | None = None
    socket: str | None = None
    security: str | None = None
    image: str | None = None
    unfit: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)


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
    """A rented machine.

    `price_per_hour` is the price that the provider reports, or None if it reports none. `created` is in
    seconds since the epoch.
    """

    id: str
    name: str
    price_per_hour: float | None = None
    gpus: str | None = None
    created: float | None = None
    spot: bool = False
    """True if the provider may end the pod at any time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodStatus:
    """State of a pod.

    `detail` is the name of the state at the provider, `progress` is from 0 to 1, and `ssh` has one address
    per node. `failure` is the reason why the pod will never be ready, or None.
    """

    state: PodState
    detail: str = ""
    ssh: tuple[SshTarget, ...] = ()
    progress: float | None = None
    price_per_hour: float | None = None
    failure: str | None = None
