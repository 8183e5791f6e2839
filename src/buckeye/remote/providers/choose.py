"""Choice of the provider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from buckeye.errors import UsageError
from buckeye.remote.providers.ssh_hosts import SshProvider

if TYPE_CHECKING:
    from buckeye.remote.providers.prime import PrimeProvider


PROVIDERS = ("prime", "ssh")


def check_provider(name: str, hosts: Sequence[str] = ()) -> None:
    """Raise UsageError for an unknown provider, a missing key or an invalid host; opens no connection."""
    open_provider(name, hosts)


def open_provider(name: str, hosts: Sequence[str] = ()) -> PrimeProvider | SshProvider:
    """Return a provider as a context manager. Raises UsageError for an unknown name or a missing key."""
    if name == "prime":
        from buckeye.remote.providers.prime import PrimeProvider
        from buckeye.remote.providers.prime_account import prime_account

        return PrimeProvider(prime_account())
    if name == "ssh":
        return SshProvider(hosts)
    raise UsageError(
        f"no provider is named {name!r}",
        code="BK-CLI-ARGUMENT",
        at="--provider",
        hint=f"choose {' or '.join(PROVIDERS)}",
    )
