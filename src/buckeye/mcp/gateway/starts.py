"""Starting environments, ending them, and keeping a few warm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.base.threads import finish_in_thread
from buckeye.mcp.client.server_process import ServerProcess
from buckeye.mcp.fork_server.servers import start_program
from buckeye.mcp.gateway.settings import Wish
from buckeye.mcp.sandbox.base import Launch, Places, Runtime

log = logging.getLogger(__name__)

_WARM_WISHES = 4
_BLOCK = 4096


@dataclass(eq=False, slots=True)
class Started:
    """A running environment that no session has used."""

    process: ServerProcess
    launch: Launch
    place: Path
    since: float = field(default_factory=time.monotonic)

    async def stop(self, *, grace: float = 2.0) -> None:
        """End the process and all it started, and remove its folder. Never raises."""
        try:
            await self.process.close(grace=grace)
        finally:
            await clean_up(self.launch, self.place)


async def start(runtime: Runtime, wish: Wish, places: Places, *, preload: bool) -> Started:
    """A process for one session; with `preload` perhaps forked from one that has imported its libraries.

    Raises PrepareError, StartError, UsageError; then nothing remains.
    """
    await runtime.prepare(wish.image)
    place = places.new()
    launch = None
    try:
        launch = await runtime.launch(wish.image, place, dict(wish.variables))
        name = wish.image or runtime.name
        if launch.program is not None:
            process = await start_program(launch.program, name=name, preload=preload)
        else:
            process = await ServerProcess.start(launch.argv, env=launch.env, name=name, cwd=launch.cwd)
    except BaseException:
        await clean_up(launch, place)
        raise
    return Started(process, launch, place)


async def clean_up(launch: Launch | None, place: Path) -> None:
    """Remove what an environment that has ended leaves; what cannot be removed is said in the log."""
    try:
        if launch is not None and launch.after is not None:
            await launch.after()
        await finish_in_thread(remove_tree, place)
    except Exception as error:
        log.warning("%s was not cleaned up: %s", place, error)


def is_larger(place: Path, most: int) -> bool:
    """Whether the files of a session take more bytes than this; each has a block at least. What is removed
    meanwhile does not count."""
    taken, waiting = 0, [os.fspath(place)]
    while waiting and taken <= most:
        with contextlib.suppress(OSError):
            for entry in os.scandir(waiting.pop()):
                with contextlib.suppress(OSError):
                    seen = entry.stat(follow_symlinks=False)
                    taken += max(_BLOCK, 512 * seen.st_blocks)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return taken > most


def remove_tree(place: Path) -> None:
    """Delete a folder of ours, whatever its modes and however deep: an environment may have made folders
    that no path reaches. Raises OSError."""
    if place.is_symlink():
        place.unlink()
        return
    moved = f".removed-{secrets.token_hex(4)}-"
    waiting, count = [place], 0
    while waiting:
        folder = waiting.pop()
        folder.chmod(0o700)
        for entry in list(os.scandir(folder)):
            with contextlib.suppress(FileNotFoundError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)  # to be moved, a folder must be writable
                count += 1
                waiting.append(Path(entry.path).rename(place / f"{moved}{count}"))
        if folder != place:
            folder.rmdir()
    place.rmdir()


class WarmPool:
    """Environments started ahead, for the images and variables that were asked for last."""

    def __init__(self, size: int, begin: Callable[[Wish], Any], *, keep_seconds: float) -> None:
        self._size, self._begin, self._keep_seconds = size, begin, keep_seconds
        self._warm: dict[Wish, list[Started]] = {}
        self._filling: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return sum(len(started) for started in self._warm.values())

    def take(self, wish: Wish) -> Started | None:
        """One that fits and still runs."""
        waiting = self._warm.get(wish, [])
        while waiting:
            started = waiting.pop(0)
            if not started.process.ended:
                return started
            self._stop([started])
        return None

    def refill(self, wish: Wish) -> None:
        """Start what is missing for this wish, in the background; forget the wish unused for longest."""
        if self._size == 0:
            return
        self._warm[wish] = self._warm.pop(wish, [])  # now the newest
        while len(self._warm) > _WARM_WISHES:
            self._stop(self._warm.pop(next(iter(self._warm))))
        self._run(self._fill(wish))

    def drop_old(self) -> None:
        """End those that nobody wanted for the time a session may be idle."""
        now = time.monotonic()
        for wish, waiting in list(self._warm.items()):
            old = [started for started in waiting if now - started.since > self._keep_seconds]
            self._warm[wish] = [started for started in waiting if started not in old]
            self._stop(old)

    async def close(self) -> None:
        """End all."""
        waiting = [started for one in self._warm.values() for started in one]
        self._warm.clear()
        self._size = 0
        self._stop(waiting)
        while self._filling:
            await asyncio.wait(set(self._filling))

    async def _fill(self, wish: Wish) -> None:
        while len(self._warm.get(wish, [])) < self._size:
            try:
                started = await self._begin(wish)
            except Exception as error:
                log.warning("No warm environment for %s: %s", wish.image or "the default", error)
                return
            if wish not in self._warm or len(self._warm[wish]) >= self._size:
                await started.stop(grace=0.0)
                return
            self._warm[wish].append(started)

    def _stop(self, old: list[Started]) -> None:
        for started in old:
            self._run(started.stop(grace=0.0))

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)
