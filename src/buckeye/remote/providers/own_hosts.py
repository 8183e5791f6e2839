"""Hosts that the user has: they are neither made nor ended, and cost nothing here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from buckeye.errors import UsageError
from buckeye.remote.base import GpuRequest, Offer, Pod, PodSpec, PodStatus
from buckeye.remote.connection import parse_target


class SshProvider:
    """See `Provider`. One pod, which is all the hosts together; its id is their addresses."""

    name = "ssh"
    rents = False
    ssh_key_path: Path | None = None

    def __init__(self, hosts: Sequence[str]) -> None:
        if not hosts:
            raise UsageError("--provider ssh needs --host user@host[:port].")
        try:
            self._targets = tuple(parse_target(host) for host in hosts)
        except ValueError as error:
            raise UsageError(f"--host: {error}.") from None
        if len(set(self._targets)) < len(self._targets):
            raise UsageError(f"--host: one of {', '.join(hosts)} is named twice.")
        self._id = ",".join(map(str, self._targets))

    def __enter__(self) -> SshProvider:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def offers(self, gpus: GpuRequest, *, disk_gb: int) -> list[Offer]:
        """The hosts, for nothing."""
        return [Offer(provider=self.name, gpus=gpus, price_per_hour=0.0, disk_gb=disk_gb, cloud=self._id)]

    def create(self, offer: Offer, spec: PodSpec) -> Pod:
        """The hosts as they are, whatever the offer says."""
        return Pod(id=self._id, name=spec.name, price_per_hour=0.0)

    def status(self, pod_id: str) -> PodStatus:
        """Always ready: whether they answer, ssh will find out."""
        if pod_id != self._id:
            return PodStatus(state="gone", detail="another host")
        return PodStatus(state="ready", ssh=self._targets, price_per_hour=0.0)

    def terminate(self, pod_id: str) -> None:
        """The hosts stay as they are."""

    def pods(self) -> list[Pod]:
        """None that could be forgotten."""
        return []
