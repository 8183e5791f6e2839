"""The provider that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buckeye.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from buckeye.remote.providers.prime import PrimeProvider
    from buckeye.remote.providers.ssh import SshProvider

PROVIDERS = ("prime", "ssh")


def open_provider(name: str, hosts: Sequence[str] = ()) -> PrimeProvider | SshProvider:
    """A provider by name, to be used in a `with`. Raises UsageError for an unknown one, or without a key."""
    if name == "prime":
        from buckeye.remote.providers.prime import PrimeProvider
        from buckeye.remote.providers.prime_account import prime_account

        return PrimeProvider(prime_account())
    if name == "ssh":
        from buckeye.remote.providers.ssh import SshProvider

        return SshProvider(hosts)
    raise UsageError(f"--provider {name}: there are {' and '.join(PROVIDERS)}.")
