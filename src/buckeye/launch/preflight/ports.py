"""Reserve ports of this host for the servers of a run, and find the address that other hosts connect to.

A locked file reserves a port for a run until the run ends, even while no server listens on the port. So two
runs of one user never get the same port.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import random
import socket
from collections.abc import Mapping, Sequence

import psutil

from buckeye.base.storage import private_folder
from buckeye.errors import RunError, UsageError

# Linux takes ports for outgoing connections from a higher range. A port in that range could be taken while
# its server restarts.
_PORT_RANGE = range(20000, 32000)
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Ports:
    """Ports that are reserved until `close`."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}

    def choose(self, count: int) -> list[int]:
        """Reserve `count` more free ports and return them. Raises RunError if fewer ports are free."""
        chosen: list[int] = []
        for port in random.sample(_PORT_RANGE, len(_PORT_RANGE)):
            if len(chosen) == count:
                return chosen
            if port not in self._held and self._lock(port):
                if is_free(port):
                    chosen.append(port)
                else:
                    self._release(port)
        raise RunError(
            f"fewer than {count} free ports from {_PORT_RANGE.start} to {_PORT_RANGE.stop - 1}",
            code="BK-PORT-TAKEN",
            hint="end runs or other servers on this machine",
        )

    def reserve(self, ports: Sequence[int]) -> None:
        """Reserve the ports that the user set. Raises UsageError if a port is in use."""
        for port in ports:
            if not self._lock(port) or not is_free(port):
                raise UsageError(
                    f"port {port} is in use by another process",
                    code="BK-PORT-TAKEN",
                    at="inference.server.port",
                    hint="stop that process, choose another port, or remove the setting to use a free port",
                )

    def close(self) -> None:
        """Release all ports."""
        for port in list(self._held):
            self._release(port)

    def _lock(self, port: int) -> bool:
        if port in self._held:
            return True
        path = private_folder("ports") / str(port)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = os.stat(path).st_ino == os.fstat(handle).st_ino  # False if another process deleted it
        except OSError:
            is_held = False
        if not is_held:
            os.close(handle)
            return False
        self._held[port] = handle
        return True

    def _release(self, port: int) -> None:
        # the file is still locked, so no other process uses it
        (private_folder("ports") / str(port)).unlink(missing_ok=True)
        os.close(self._held.pop(port))


class UnassignedPorts:
    """Ports of a run that is only planned. The ports are 0, because a run chooses ports when it starts."""

    def choose(self, count: int) -> list[int]:
        """Return `count` zeros."""
        return [0] * count


def is_free(port: int) -> bool:
    """Return True if a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address, or None."""
    target = ipaddress.ip_address(address)
    loopback = None
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            try:
                candidate = ipaddress.ip_address(entry.address.partition("%")[0])
            except ValueError:  # a hardware address
                continue
            if candidate == target:
                return name
            if candidate.is_loopback:
                loopback = name
    return loopback if target.is_loopback else None  # the loopback interface has all of 127.0.0.0/8


def socket_variables(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make gloo and NCCL use the network interface of `address`.

    Variables that are already set in `environ` are left out.
    """
    interface = interface_of(address)
    if interface is None:
        return {}
    return {name: interface for name in _INTERFACE_VARIABLES if name not in environ}


def address_towards(host: str) -> str:
    """Return the address of this host in the network of `host`. `host` can connect to this address.

    Raises OSError if the name cannot be resolved.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
