"""Update of the engines to new weights as soon as the trainer publishes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from buckeye.base import heartbeat
from buckeye.base.disk import write_when_room_async
from buckeye.base.process import RunIdentity
from buckeye.base.storage import step_directory
from buckeye.errors import FinalRunError, RunError
from buckeye.inference.client import Broadcast, InferenceClient
from buckeye.transport.restart_requests import request_restart
from buckeye.transport.weights import newest_weights, read_weights_manifest, verify_weights
from buckeye.transport.weights_offer import find_offer

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.005


class BrokenServers:
    """Requests to the launcher to restart a server that runs but is broken.

    If the newest weights on disk are damaged, a restart does not help, because no server can load them.
    """

    def __init__(self, output_dir: Path, identity: RunIdentity) -> None:
        self._output_dir = output_dir
        self._identity = identity
        self._reported: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def report(self, url: str, reason: str) -> None:
        """Queue a restart request for a broken server."""
        self._reported.put_nowait((url, reason))

    async def run(self) -> None:
        """Send queued restart requests, until cancelled.

        Raise `TransportError` if the newest weights are damaged: the run must resume from its last
        checkpoint.
        """
        while True:
            url, reason = await self._reported.get()
            await asyncio.to_thread(self._verify)
            request = partial(request_restart, self._output_dir, url, reason)
            await write_when_room_async(self._output_dir, request, what="a restart request", needed=0)

    def _verify(self) -> None:
        newest = newest_weights(self._output_dir / "weights", identity=self._identity)
        if newest is not None:
            verify_weights(newest[1])


class WeightsWatcher:
    """Watcher of `weights/` that updates every engine to the newest version, during rollouts.

    `newest_possible()` returns the number of batches written, which is the newest version that can exist.
    `due()` returns the next version to evaluate, or None. The engines keep this version until it is
    evaluated.
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
        """Version of the engines; before the first update, one less than the first version that they get."""
        self.update_seconds = 0.0
        """Total seconds of all updates."""

    async def run(self) -> None:
        """Update the engines until cancelled.

        Raise `TransportError` or `InferenceError` if an update fails or the engines cannot recover.
        """
        while True:
            self._client.check()
            if not await self._receive():
                target = self._next()
                if target is not None and target[0] > self.version:
                    await self._update(*target)
            await asyncio.sleep(_POLL_SECONDS)

    def _next(self) -> tuple[int, Path] | None:
        """Return the newest version, or the version to evaluate if it is older.

        The older version still exists, because the trainer keeps as many versions as it can be ahead.
        """
        newest = newest_weights(self._root, identity=self._identity, above=self.version)
        due = self._due()
        if newest is None or due is None or newest[0] <= due:
            return newest
        return due, step_directory(self._root, due)

    async def _receive(self) -> bool:
        """Update the engines to the version that the trainer offers. Return False without an offer."""
        offer, due = find_offer(self._root.parent, identity=self._identity), self._due()
        if offer is None:
            return False
        version = offer.manifest.step
        if version <= self.version or (due is not None and version > due):
            return False
        broadcast = self._client.accept_offer(self._root.parent, offer)
        if broadcast is None:
            return False
        await self._update(version, step_directory(self._root, version), broadcast)
        return True

    async def wait_for_version(self, version: int, timeout: float) -> None:
        """Wait until the engines have `version` or a newer one.

        Raise `RunError` after `timeout` seconds; time during an evaluation does not count.
        """
        if self.version >= version:
            return
        deadline = time.monotonic() + timeout
        heartbeat.report(f"weights {version}", on="trainer")
        while self.version < version:
            if self.version == self._due():
                deadline = time.monotonic() + timeout
            elif time.monotonic() > deadline:
                raise RunError(
                    f"no weights of version {version} in {self._root} within {timeout:g} s",
                    code="BK-WEIGHTS-TIMEOUT",
                    hint="check the log of the trainer, or raise orchestrator.weights_timeout",
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _update(self, version: int, path: Path, broadcast: Broadcast | None = None) -> None:
        if version > self._newest_possible():
            raise FinalRunError(
                f"{path} is newer than the last step of this run: it is from an earlier run",
                code="BK-RUN-MISMATCH",
                hint="use another output directory, or resume the earlier run",
            )
        log.info("Updating weights to weight checkpoint %d", version)
        started = time.monotonic()
        manifest = read_weights_manifest(path) if broadcast is None else broadcast.offer.manifest
        await self._client.update_weights(
            path,
            version,
            manifest.checksum,
            canary=manifest.canary,
            adapter=manifest.adapter,
            broadcast=broadcast,
        )
        self.update_seconds += time.monotonic() - started
        self.version = version
        self._on_update(version)
