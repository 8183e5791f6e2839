"""Hosts that the user has: they are neither created nor ended, and cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from buckeye.errors import UsageError
from buckeye.remote.base import GpuRequest, Offer, Pod, PodSpec, PodStatus
from buckeye.remote.connection import parse_target


class SshProvider:
    """Provider with one pod: all hosts of the user together. Its id is their addresses."""

    name = "ssh"
    is_rental = False
    ssh_key_path: Path | None = None

    def __init__(self, hosts: Sequence[str]) -> None:
        if not hosts:
            raise UsageError(
                "--provider ssh needs --host", code="BK-CLI-MISSING", hint="add --host user@host[:port]"
            )
        try:
            self._targets = tuple(parse_target(host) for host in hosts)
        except ValueError as error:
            hint = "write --host user@host or --host user@host:port"
            raise UsageError(str(error), code="BK-CLI-ARGUMENT", at="--host", hint=hint) from None
        if len(set(self._targets)) < len(self._targets):
            raise UsageError(
                f"a host is named twice: {', '.join(hosts)}", code="BK-CLI-ARGUMENT", at="--host"
            )
        self._id = ",".join(map(str, self._targets))

    def __enter__(self) -> SshProvider:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def offers(self, gpus: GpuRequest, *, disk_gb: int) -> list[Offer]:
        """Return one offer with all hosts, at a price of 0."""
        return [Offer(provider=self.name, gpus=gpus, price_per_hour=0.0, disk_gb=disk_gb, cloud=self._id)]

    def create(self, offer: Offer, spec: PodSpec) -> Pod:
        """Return the pod of the hosts, for any offer."""
        return Pod(id=self._id, name=spec.name, price_per_hour=0.0)

    def status(self, pod_id: str) -> PodStatus:
        """Return the state `ready` without a check: the ssh connection shows if the hosts are reachable."""
        if pod_id != self._id:
            return PodStatus(state="gone", detail="another host")
        return PodStatus(state="ready", ssh=self._targets, price_per_hour=0.0)

    def terminate(self, pod_id: str) -> None:
        """Do nothing: the hosts continue."""

    def pods(self) -> list[Pod]:
        """Return no pods, because none can be forgotten."""
        return []
