"""Parse the responses of Prime Intellect to offers, pods, and states of pods. Most fields may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from buckeye.launch.preflight.devices import GpuSpec
from buckeye.remote.base import NAME_PREFIX, Offer, Pod, PodState, PodStatus, SshTarget
from buckeye.remote.connection import parse_target

_IN_STOCK = ("available", "high", "medium", "low")
_IMAGES = (
    "cuda_12_6_pytorch_2_7",
    "cuda_12_4_pytorch_2_6",
    "cuda_12_4_pytorch_2_5",
    "cuda_12_4_pytorch_2_4",
    "cuda_12_1_pytorch_2_4",
    "ubuntu_22_cuda_12",
)
"""Images that work with a driver for CUDA 12, best first."""
_DISK_TAKEN_GB = {"runpod": 40}  # GB of the ordered disk that the file system of the image uses


class Amount(msgspec.Struct, rename="camel"):
    """Possible amounts of disk, CPUs or memory of an offer, and the price of one unit per hour."""

    min_count: float | None = None
    default_count: float | None = None
    max_count: float | None = None
    price_per_unit: float | None = None
    step: float | None = None
    default_included_in_price: bool | None = None

    def cost(self, count: float | None) -> float:
        """Return the price per hour of `count` units, in addition to the base price of the offer."""
        wanted = self.default_count if count is None else count
        free = self.default_count if self.default_included_in_price else 0
        return max(0.0, (wanted or 0) - (free or 0)) * (self.price_per_unit or 0)


class Prices(msgspec.Struct, rename="camel"):
    """Price of an offer per hour, for all its GPUs together."""

    on_demand: float | None = None
    community_price: float | None = None
    is_variable: bool | None = None
    currency: str | None = None


class OfferRow(msgspec.Struct, rename="camel"):
    """An offered machine, as the API describes it."""

    cloud_id: str
    gpu_type: str
    gpu_count: int
    gpu_memory: float = 0.0
    socket: str | None = None
    provider: str | None = None
    region: str | None = None
    data_center: str | None = None
    country: str | None = None
    disk: Amount | None = None
    vcpu: Amount | None = None
    memory: Amount | None = None
    stock_status: str | None = None
    security: str | None = None
    prices: Prices | None = None
    images: list[str] | None = None
    is_spot: bool | None = None


class PodStatusRow(msgspec.Struct, rename="camel"):
    """State of a pod, from `/pods/status` or `/pods/ID`."""

    status: str = "UNKNOWN"
    ssh_connection: Any = None
    ip: Any = None
    installation_status: str | None = None
    installation_failure: str | None = None
    installation_progress: float | None = None
    cost_per_hr: float | None = None
    price_hr: float | None = None
    prime_port_mapping: Any = None


class PodRow(msgspec.Struct, rename="camel"):
    """A pod, from the list of pods or the response to an order."""

    id: str
    name: str | None = None
    status: str | None = None
    gpu_name: str | None = None
    gpu_count: int | None = None
    price_hr: float | None = None
    created_at: str | None = None
    is_spot: bool | None = None


def parse_offer(row: Any, *, disk_gb: int) -> Offer:
    """Return an offer with at least `disk_gb` of free disk.

    Raises `msgspec.ValidationError` if the row lacks a field that an order needs.
    """
    read = msgspec.convert(row, OfferRow)
    prices = read.prices or Prices()
    base = prices.on_demand if prices.community_price is None else prices.community_price
    size = _disk_size(read, disk_gb)
    price = (base or 0.0) + sum(
        amount.cost(count)
        for amount, count in ((read.disk, size), (read.vcpu, None), (read.memory, None))
        if amount is not None
    )
    image = next((name for name in _IMAGES if name in (read.images or ())), None)
    return Offer(
        gpus=GpuSpec(read.gpu_count, read.gpu_type, read.gpu_memory),
        price_per_hour=price,
        disk_gb=size,
        cloud=read.provider or "unknown",
        region=read.region,
        location=", ".join(word for word in (read.data_center, read.country) if word) or None,
        socket=read.socket,
        security=read.security,
        image=image,
        unfit=_unfit(read, base, size, image),
        row=row,
    )


def _unfit(row: OfferRow, base: float | None, disk_gb: int, image: str | None) -> str | None:
    """Return the reason why Buckeye cannot use an offer, or None.

    If the stock is unknown, the offer counts as out of stock.
    """
    prices = row.prices or Prices()
    if row.is_spot or prices.is_variable:
        return "can be taken away, or changes its price"
    if base is None or base <= 0 or (prices.currency or "USD") != "USD":
        return "has no price in dollars"
    if (row.stock_status or "").lower() not in _IN_STOCK:
        return "is not in stock"
    if row.socket is None or row.provider is None:
        return "cannot be ordered: socket or owner is not named"
    if image is None:
        return "has no image with CUDA 12"
    if row.disk is not None and row.disk.max_count is not None and disk_gb > row.disk.max_count:
        return f"has no disk of {disk_gb} GB"
    return None


def _disk_size(row: OfferRow, disk_gb: int) -> int:
    wanted = disk_gb + _DISK_TAKEN_GB.get(row.provider or "", 0)
    disk = row.disk or Amount()
    size = max(wanted, int(disk.min_count or 0))
    step = int(disk.step or 1) or 1
    return -(-size // step) * step


def make_order(offer: Offer) -> dict[str, Any]:
    """Return the object `pod` of an order, with the values of the offer."""
    row = offer.row
    order = {
        name: row.get(name) for name in ("cloudId", "gpuType", "socket", "gpuCount", "country", "security")
    }
    order |= {"dataCenterId": row.get("dataCenter"), "image": offer.image, "autoRestart": False}
    if row.get("disk"):
        order["diskSize"] = offer.disk_gb
    for name, key in (("vcpu", "vcpus"), ("memory", "memory")):
        count = (row.get(name) or {}).get("defaultCount")
        if count:
            order[key] = count
    return {name: value for name, value in order.items() if value is not None}


def parse_pod(found: Any) -> Pod:
    """Return a pod. Raises `msgspec.ValidationError` if it has no id."""
    row = msgspec.convert(found, PodRow)
    gpus = f"{row.gpu_count}x{row.gpu_name}" if row.gpu_count and row.gpu_name else None
    return Pod(
        id=row.id,
        name=row.name or "",
        price_per_hour=row.price_hr,
        gpus=gpus,
        created=_seconds(row.created_at),
        spot=bool(row.is_spot),
    )


def is_ours(found: Any) -> bool:
    """Return True if an entry in the list of pods was ordered by Buckeye and has not ended."""
    return (
        isinstance(found, dict)
        and str(found.get("name") or "").startswith(NAME_PREFIX)
        and found.get("status") != "TERMINATED"
    )


def parse_status(found: Mapping[str, Any]) -> PodStatus:
    """Return the state of a pod. Raises `msgspec.ValidationError` for an invalid answer."""
    row = msgspec.convert(found, PodStatusRow)
    ssh = _targets(row)
    progress = None if row.installation_progress is None else min(1.0, row.installation_progress / 100)
    failure = row.installation_failure
    if failure is None and row.status in ("ERROR", "STOPPED"):
        failure = f"the provider reports {row.status}"
    return PodStatus(
        state=_state(row, failure, ssh),
        detail=row.status if row.status != "ACTIVE" else (row.installation_status or "ACTIVE"),
        ssh=ssh,
        progress=progress,
        price_per_hour=row.price_hr if row.price_hr is not None else row.cost_per_hr,
        failure=failure,
    )


def _state(row: PodStatusRow, failure: str | None, ssh: tuple[SshTarget, ...]) -> PodState:
    if row.status == "TERMINATED":
        return "gone"
    if row.status == "DELETING":
        return "ending"
    if failure is not None:
        return "failed"
    installed = row.installation_status == "FINISHED" or row.installation_progress in (None, 100)
    return "ready" if row.status == "ACTIVE" and ssh and installed else "starting"


def _targets(row: PodStatusRow) -> tuple[SshTarget, ...]:
    """Return one address per node, or () if an address is missing or invalid."""
    lines = [line for line in _listed(row.ssh_connection) if line]
    if not lines or None in _listed(row.ssh_connection):
        lines = _mapped(row)
    try:
        return tuple(parse_target(str(line)) for line in lines)
    except ValueError:
        return ()


def _mapped(row: PodStatusRow) -> list[str]:
    """Return addresses for ssh, made of the IP addresses and the external port for port 22."""
    for entry in _listed(row.prime_port_mapping):
        if isinstance(entry, dict) and (entry.get("usedBy") == "SSH" or str(entry.get("internal")) == "22"):
            outside = str(entry.get("external"))
            if outside.isdecimal():
                return [f"root@{ip}:{outside}" for ip in _listed(row.ip) if ip]
    return []


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _seconds(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
