"""Looking after a job from here: what it prints, as it prints it, and what it writes; through cuts."""

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
from buckeye.remote.connection import Link, LostConnectionError
from buckeye.remote.job import Job, Questions, questions
from buckeye.remote.pod.agent import LOG
from buckeye.remote.pull import PIECE, Mirror, listing

_LOOK_SECONDS = 1.0
_PULL_SECONDS = 5.0
_PATIENCE = 2 * 3600.0
_VANISHED_LOOKS = 3
_START_SECONDS = 60.0
_TELL_SECONDS = 15.0
_MOST_LOG_BYTES = 2**30


@dataclass(slots=True)
class Follower:
    """One job, the file that gets what it prints (`log`; what is in it already was printed before), the
    `screen` that gets it too, and the mirror of what it writes."""

    link: Link
    job: Job
    log: Path
    screen: BinaryIO
    mirror: Mirror
    tell: Callable[[str], None]
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to ask the job to end, with a checkpoint."""
    _told_log: bool = False

    async def until_end(self) -> int:
        """The exit code of the job, when all that it has printed and written is here. Raises RemoteError if
        it has vanished, or cannot be reached for two hours."""
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

    async def _through_cuts(self, work: Callable[[Questions], Any]) -> Any:
        """Do something with an agent, again and again until no cut is in between."""
        while True:
            try:
                await self.link.connect(patience=_PATIENCE)
                async with questions(self.link, self.job) as asked:
                    return await work(asked)
            except LostConnectionError as error:
                self.tell(f"{error} Trying again; the run goes on there.")

    async def _follow(self, asked: Questions) -> int:
        """Print until the job is over."""
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
                    f"The run on {self.link.target} has vanished without a word: it was killed, or the "
                    f"machine was started anew. {printable(str(look['ended_by'] or ''))[:1000]}".strip()
                )
            now = time.monotonic()
            if self.stop.is_set() and look["running"] and not asked_to_stop:
                await asked.request("stop")
                asked_to_stop = told = now
            if asked_to_stop and now - told > _TELL_SECONDS:
                self.tell(f"Waiting for the run there to checkpoint and end ({now - asked_to_stop:.0f} s)")
                told = now
            await asyncio.sleep(_LOOK_SECONDS)

    async def _print(self, asked: Questions, size: int) -> None:
        """Append what is new to the log here, and to the screen."""
        here = self.log.stat().st_size if self.log.exists() else 0
        while here < min(size, _MOST_LOG_BYTES):
            _, content = await asked.request("read", path=LOG, offset=here, length=min(PIECE, size - here))
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
        """Bring home what is new, until it is cancelled. That something cannot be written here is told, and
        tried again: the run itself is elsewhere."""
        told = ""
        while True:
            try:
                await self._through_cuts(self._pull)
            except (OSError, RemoteError) as error:
                if str(error) != told:
                    self.tell(f"warning: not everything could be brought home yet: {error}")
                told = str(error)
            await asyncio.sleep(_PULL_SECONDS)

    async def _pull(self, asked: Questions) -> None:
        while True:
            look, _ = await asked.request("look")
            await self.mirror.update(listing(look["files"]), asked.request)
            await asyncio.sleep(_PULL_SECONDS)

    async def _keep_looking(self, asked: Questions) -> None:
        """Show that somebody is here while large files come."""
        while True:
            await asked.request("look")
            await asyncio.sleep(_PULL_SECONDS)

    async def _pull_all(self, asked: Questions) -> None:
        look, _ = await asked.request("look")
        await self.mirror.update(listing(look["files"]), asked.request, final=True)
