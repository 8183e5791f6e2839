"""Inference servers that run and are not right: is it they, or the weights that they were given?"""

from __future__ import annotations

import asyncio
from pathlib import Path

from buckeye.process import RunIdentity
from buckeye.transport.restarts import request_restart
from buckeye.transport.weights import newest_weights, verify_weights


class WrongServers:
    """Asks the launcher to start such a server anew. If the newest weights on the disk are damaged, no server
    would ever take them, and every start would be in vain."""

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
