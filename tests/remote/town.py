"""Fake provider whose pods are machines in namespaces, open to a single API key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tests.remote.landlord import KEY, Landlord, serve
from tests.remote.laptop import SECRET, Laptop, files_with
from tests.remote.machine import machine
from tests.remote.sshd import Host, processes_of


class Town:
    """Machines that a laptop can rent, as a context manager."""

    words = ("--gpus", "2xA100", "--provider", "prime", "--yes")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, tuple[Host, contextlib.ExitStack]] = {}
        self.ended: list[Host] = []
        self.home: Callable[[Path], AbstractContextManager[object]] = lambda home: nullcontext()
        """Context manager for a pod's home directory, entered before the pod starts."""
        self.landlord = Landlord(
            active_after=0.0, ready_after=0.0, start_pod=self._start_pod, end_pod=self._end_pod
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Town:
        url = self._stack.enter_context(serve(self.landlord))
        self.port = int(url.rpartition(":")[2])
        self.environment = {"PRIME_API_BASE_URL": url, "PRIME_API_KEY": KEY}
        return self

    def __exit__(self, *_: object) -> None:
        for _host, stack in list(self.pods.values()):
            stack.close()
        self._stack.close()

    @property
    def host(self) -> Host:
        """Machine of the only pod."""
        (host, _) = next(iter(self.pods.values()))
        return host

    def _start_pod(self, pod: dict[str, Any]) -> str:
        stack = contextlib.ExitStack()
        folder = self.folder / pod["id"]
        folder.mkdir(parents=True)
        stack.enter_context(self.home(folder / "home"))
        asked = pod["_order"]["sshKeyId"]
        authorized = next(key["publicKey"] for key in self.landlord.keys if key["id"] == asked)
        host = stack.enter_context(machine(folder, authorized=authorized, reaches=(self.port,)))
        self.pods[pod["id"]] = (host, stack)
        return f"{host.target.user}@{host.target.host} -p {host.target.port}"

    def _end_pod(self, pod: dict[str, Any]) -> None:
        if pod["id"] in self.pods:
            host, stack = self.pods.pop(pod["id"])
            stack.close()
            self.ended.append(host)


def assert_nothing_left(town: Town, laptop: Laptop) -> None:
    """Assert that no pod, no process of a pod, and no key in any file is left."""
    assert town.landlord.alive == []
    for host in town.ended:
        assert processes_of(host.folder) == []
    folders = [*(host.folder for host in town.ended), laptop.home, laptop.output]
    assert files_with(SECRET, *folders) == []
    assert files_with(KEY, *folders) == []
