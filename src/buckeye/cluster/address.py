"""The network of a host: which of its interfaces has an address, which of its addresses reaches another host.

`python -m buckeye.cluster.address HOST` prints the latter.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping

import psutil

_CHOSEN_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_of(address: str) -> str | None:
    """The interface that has an address; None if none has it."""
    wanted = ipaddress.ip_address(address)
    loopback = None
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            try:
                found = ipaddress.ip_address(one.address.partition("%")[0])
            except ValueError:  # of hardware
                continue
            if found == wanted:
                return name
            if found.is_loopback:
                loopback = name
    return loopback if wanted.is_loopback else None  # it has the whole of 127.0.0.0/8


def socket_variables(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What tells gloo and NCCL to meet others on the interface of an address, but for what `environ` says
    already."""
    interface = interface_of(address)
    if interface is None:
        return {}
    return {name: interface for name in _CHOSEN_BY if name not in environ}


def own_addresses() -> list[str]:
    """The addresses of this host that others may reach it under."""
    found = []
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            try:
                address = ipaddress.ip_address(one.address)
            except ValueError:
                continue
            if not address.is_loopback and not address.is_link_local:
                found.append(str(address))
    return found


def address_towards(host: str) -> str:
    """The address of this host under which another one is reached, and should reach it. Raises OSError for a
    name that nobody knows."""
    family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    sys.stdout.write(f"{address_towards(sys.argv[1])}\n")
