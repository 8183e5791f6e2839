"""Start and end of environments."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.threads import finish_in_thread
from buckeye.mcp.client.server_process import ServerProcess
from buckeye.mcp.fork_server.pool import start_program
from buckeye.mcp.gateway.settings import LaunchRequest
from buckeye.mcp.sandbox.runtime import LaunchSpec, Runtime

log = logging.getLogger(__name__)

_BLOCK = 4096


@dataclass(eq=False, slots=True)
class RunningEnvironment:
    """A running environment, with its launch and its folder."""

    process: ServerProcess
    launch: LaunchSpec
    root: Path

    async def stop(self, *, grace: float = 2.0) -> None:
        """End the process and all its children, and remove its folder. Never raises."""
        try:
            await self.process.close(grace=grace)
        finally:
            await clean_up(self.launch, self.root)


async def start_environment(
    runtime: Runtime, launch_request: LaunchRequest, folders: Path, *, preload: bool
) -> RunningEnvironment:
    """Start the process of one session, in a new folder in `folders`.

    With `preload` it may be forked from a process that has imported its libraries. Raises PrepareError,
    StartError or UsageError, and then leaves nothing behind.
    """
    await runtime.prepare(launch_request.image)
    root = Path(tempfile.mkdtemp(dir=folders))
    launch = None
    try:
        launch = await runtime.launch(launch_request.image, root, dict(launch_request.variables))
        name = launch_request.image or runtime.name
        process = await start_program(launch.program, name=name, preload=preload and launch.can_fork)
    except BaseException:
        await clean_up(launch, root)
        raise
    return RunningEnvironment(process, launch, root)


async def clean_up(launch: LaunchSpec | None, root: Path) -> None:
    """Remove the remains of an ended environment. A failure is logged."""
    try:
        if launch is not None and launch.on_exit is not None:
            await launch.on_exit()
        await finish_in_thread(remove_tree, root)
    except Exception as error:
        log.warning("Cannot clean up %s: %s", root, error)


def is_larger(root: Path, max_bytes: int) -> bool:
    """Return True if the files under `root` take more than `max_bytes` bytes of disk.

    Each entry counts as at least one block. Entries that disappear during the check do not count.
    """
    total, folders = 0, [os.fspath(root)]
    while folders and total <= max_bytes:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folders.pop()):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    total += max(_BLOCK, 512 * status.st_blocks)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return total > max_bytes


def remove_tree(root: Path) -> None:
    """Delete a folder regardless of modes and depth. Raises OSError.

    Folders that are too deep for a path are moved up first.
    """
    if root.is_symlink():
        root.unlink()
        return
    moved = f".removed-{secrets.token_hex(4)}-"
    folders, count = [root], 0
    while folders:
        folder = folders.pop()
        folder.chmod(0o700)
        for entry in list(os.scandir(folder)):
            with contextlib.suppress(FileNotFoundError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)  # moving a folder requires write permission on it
                count += 1
                folders.append(Path(entry.path).rename(root / f"{moved}{count}"))
        if folder != root:
            folder.rmdir()
    root.rmdir()
