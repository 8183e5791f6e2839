"""Start and end of environments."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.threads import finish_in_thread
from buckeye.mcp.client.server_process import ServerProcess
from buckeye.mcp.fork_server.servers import start_program
from buckeye.mcp.gateway.settings import Wish
from buckeye.mcp.sandbox.base import Launch, Places, Runtime

log = logging.getLogger(__name__)

_BLOCK = 4096


@dataclass(eq=False, slots=True)
class Started:
    """A running environment, with its launch and its folder."""

    process: ServerProcess
    launch: Launch
    place: Path

    async def stop(self, *, grace: float = 2.0) -> None:
        """End the process and all its children, and remove its folder. Never raises."""
        try:
            await self.process.close(grace=grace)
        finally:
            await clean_up(self.launch, self.place)


async def start(runtime: Runtime, wish: Wish, places: Places, *, preload: bool) -> Started:
    """Start the process of one session.

    With `preload` it may be forked from a process that has imported its libraries. Raises PrepareError,
    StartError or UsageError, and then leaves nothing behind.
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
    """Remove the remains of an ended environment. A failure is logged."""
    try:
        if launch is not None and launch.after is not None:
            await launch.after()
        await finish_in_thread(remove_tree, place)
    except Exception as error:
        log.warning("%s was not cleaned up: %s", place, error)


def is_larger(place: Path, most: int) -> bool:
    """Return True if the files under `place` take more than `most` bytes of disk.

    Each entry counts as at least one block. Entries that disappear during the check do not count.
    """
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
    """Delete a folder regardless of modes and depth. Raises OSError.

    An environment may have made folders so deep that no path reaches them; those are moved up first.
    """
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
                os.chmod(entry.path, 0o700)  # moving a folder requires write permission on it
                count += 1
                waiting.append(Path(entry.path).rename(place / f"{moved}{count}"))
        if folder != place:
            folder.rmdir()
    place.rmdir()
