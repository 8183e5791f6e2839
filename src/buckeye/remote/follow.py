"""Following a remote job from here: its output and its files, across lost connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from buckeye.base.disk import human_bytes
from buckeye.base.json_lines import printable
from buckeye.base.storage import utf8
from buckeye.errors import RemoteError
from buckeye.remote.connection import LostConnectionError, SshConnection
from buckeye.remote.download import CHUNK_BYTES, Mirror, parse_listing
from buckeye.remote.job import AgentClient, Job, open_agent
from buckeye.remote.pod.agent import JOB_LOG

_LOOK_SECONDS = 1.0
_PULL_SECONDS = 5.0
_PATIENCE = 2 * 3600.0
_VANISHED_LOOKS = 3
_START_SECONDS = 60.0
_TELL_SECONDS = 15.0
_MOST_LOG_BYTES = 2**30


@dataclass(slots=True)
class Follower:
    """Follows one job.

    `log` is the local file for its output; output that is in it already is not printed again. `screen` gets
    the output too. `mirror` copies the files that the job writes.
    """

    link: SshConnection
    job: Job
    log: Path
    screen: BinaryIO
    mirror: Mirror
    tell: Callable[[str], None]
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set this to request the job to end with a checkpoint."""
    _told_log: bool = False

    async def until_end(self) -> int:
        """Return the exit code of the job once all its output and files are here.

        Raises RemoteError if the job has vanished, or is unreachable for two hours.
        """
        pulling = asyncio.create_task(self._keep_pulling())
        try:
            code = await self._through_cuts(self._follow)
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
        self.tell("The run there has ended. Bringing home what is not here yet ...")
        looking = asyncio.create_task(self._through_cuts(self._keep_looking))
        try:
            await self._through_cuts(self._pull_all)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        return code

    async def _through_cuts(self, work: Callable[[AgentClient], Any]) -> Any:
        """Run `work` with an agent; reconnect and repeat it until no connection loss interrupts it."""
        while True:
            try:
                await self.link.connect(timeout=_PATIENCE)
                async with open_agent(self.link, self.job) as asked:
                    return await work(asked)
            except LostConnectionError as error:
                self.tell(f"{error.message}; retrying, the remote run continues")

    async def _follow(self, asked: AgentClient) -> int:
        """Print the output until the job is over, and return its exit code."""
        silent, began, asked_to_stop = 0, time.monotonic(), 0.0
        told = 0.0
        while True:
            look, _ = await asked.request("look")
            await self._print(asked, look["log_size"])
            if look["code"] is not None:
                return int(look["code"])
            lost = look["started"] or time.monotonic() - began > _START_SECONDS
            silent = silent + 1 if lost and not look["running"] else 0
            if silent >= _VANISHED_LOOKS:
                raise RemoteError(
                    f"the run on {self.link.target} ended without a report: it was killed, or the machine "
                    f"restarted. {printable(str(look['ended_by'] or ''))[:1000]}".strip(),
                    code="BK-REMOTE-JOB",
                )
            now = time.monotonic()
            if self.stop.is_set() and look["running"] and not asked_to_stop:
                await asked.request("stop")
                asked_to_stop = told = now
            if asked_to_stop and now - told > _TELL_SECONDS:
                self.tell(f"Waiting for the run there to checkpoint and end ({now - asked_to_stop:.0f} s)")
                told = now
            await asyncio.sleep(_LOOK_SECONDS)

    async def _print(self, asked: AgentClient, size: int) -> None:
        """Append new output to the local log and to the screen."""
        here = self.log.stat().st_size if self.log.exists() else 0
        while here < min(size, _MOST_LOG_BYTES):
            _, content = await asked.request(
                "read", path=JOB_LOG, offset=here, length=min(CHUNK_BYTES, size - here)
            )
            if not content:
                return
            with self.log.open("ab") as file:
                file.write(content)
            self.screen.write(utf8(printable(content.decode(errors="replace"))))
            self.screen.flush()
            here += len(content)
        if size > _MOST_LOG_BYTES and not self._told_log:
            self._told_log = True
            self.tell(
                f"The run there has printed more than {human_bytes(_MOST_LOG_BYTES)}: the rest is not shown"
            )

    async def _keep_pulling(self) -> None:
        """Download new files until cancelled.

        A failure to write them here is reported and retried, because the remote run is not affected.
        """
        told = ""
        while True:
            try:
                await self._through_cuts(self._pull)
            except (OSError, RemoteError) as error:
                if str(error) != told:
                    self.tell(f"warning: not all files are downloaded yet: {error}")
                told = str(error)
            await asyncio.sleep(_PULL_SECONDS)

    async def _pull(self, asked: AgentClient) -> None:
        while True:
            look, _ = await asked.request("look")
            await self.mirror.update(parse_listing(look["files"]), asked.request)
            await asyncio.sleep(_PULL_SECONDS)

    async def _keep_looking(self, asked: AgentClient) -> None:
        """Send signs of life while large files are downloaded, so that the watchdog does not end the job."""
        while True:
            await asked.request("look")
            await asyncio.sleep(_PULL_SECONDS)

    async def _pull_all(self, asked: AgentClient) -> None:
        look, _ = await asked.request("look")
        await self.mirror.update(parse_listing(look["files"]), asked.request, final=True)
