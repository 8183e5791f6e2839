"""Bring new weights to the engines as soon as the trainer has published them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from buckeye.base import heartbeat
from buckeye.base.process import RunIdentity
from buckeye.base.storage import step_directory
from buckeye.errors import FinalRunError, RunError
from buckeye.inference.client import InferenceClient
from buckeye.transport.inference_servers import request_restart
from buckeye.transport.weights import newest_weights, read_weights_manifest, verify_weights

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02


class WrongServers:
    """Asks the launcher to restart a server that runs and is not right. If the newest weights on the disk are
    damaged, no server would ever take them, and every start would be in vain."""

    def __init__(self, output_dir: Path, identity: RunIdentity) -> None:
        self._output_dir = output_dir
        self._identity = identity
        self._reported: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def report(self, url: str, reason: str) -> None:
        """A server is not right."""
        self._reported.put_nowait((url, reason))

    async def run(self) -> None:
        """Until cancelled. Raises TransportError if the newest weights are damaged: the run has to go on from
        its last checkpoint."""
        while True:
            url, reason = await self._reported.get()
            await asyncio.to_thread(self._verify)
            request_restart(self._output_dir, url, reason)

    def _verify(self) -> None:
        newest = newest_weights(self._output_dir / "weights", identity=self._identity)
        if newest is not None:
            verify_weights(newest[1])


class WeightsWatcher:
    """Watches `weights/` and updates every engine to the newest version, in flight.

    `newest_possible()` is the number of batches handed over so far. The engines pass over no version that is
    `due()` to be measured, and keep it as long as it is.
    """

    def __init__(
        self,
        root: Path,
        client: InferenceClient,
        identity: RunIdentity,
        *,
        first_version: int,
        newest_possible: Callable[[], int],
        due: Callable[[], int | None],
        on_update: Callable[[int], None],
    ) -> None:
        self._root = root
        self._client = client
        self._identity = identity
        self._newest_possible = newest_possible
        self._due = due
        self._on_update = on_update
        first = due()
        self.version = (first_version if first is None else min(first, first_version)) - 1
        """What the engines have; before they have anything, one less than what they get first."""
        self.update_seconds = 0.0
        """How long all updates took."""

    async def run(self) -> None:
        """Until cancelled. Raises TransportError or InferenceError if an update fails, or the engines are
        beyond recovery."""
        while True:
            self._client.check()
            found = self._next()
            if found is not None and found[0] > self.version:
                await self._update(*found)
            await asyncio.sleep(_POLL_SECONDS)

    def _next(self) -> tuple[int, Path] | None:
        """The newest version, or the one before it that is to be measured. (The trainer runs no further ahead
        than it keeps versions.)"""
        newest, due = newest_weights(self._root, identity=self._identity), self._due()
        if newest is None or due is None or newest[0] <= due:
            return newest
        return due, step_directory(self._root, due)

    async def reach(self, version: int, timeout: float) -> None:
        """Until the engines have `version` or a newer one. Raises RunError after `timeout` seconds, in which
        nothing was to be measured with the version before."""
        if self.version >= version:
            return
        deadline = time.monotonic() + timeout
        heartbeat.report(f"weights {version}", on="trainer")
        while self.version < version:
            if self.version == self._due():
                deadline = time.monotonic() + timeout
            elif time.monotonic() > deadline:
                raise RunError(
                    f"weights of version {version} did not appear in {self._root} within {timeout:g} s "
                    "(orchestrator.weights_timeout): is the trainer running?"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _update(self, version: int, path: Path) -> None:
        if version > self._newest_possible():
            raise FinalRunError(
                f"{path} is newer than anything this run can have trained: it is left from an earlier run. "
                "Start in a new directory, or resume that run"
            )
        log.info("Updating weights to weight checkpoint %d", version)
        started = time.monotonic()
        manifest = read_weights_manifest(path)
        await self._client.update_weights(
            path, version, manifest.checksum, canary=manifest.canary, adapter=manifest.adapter
        )
        self.update_seconds += time.monotonic() - started
        self.version = version
        self._on_update(version)
