"""Start and stop the server process of a gateway session, and remove its folder."""

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
    """Server process of a session, its launch specification, and the folder with its files."""

    process: ServerProcess
    launch: LaunchSpec
    root: Path

    async def stop(self, *, grace: float = 2.0) -> None:
        """Stop the process and all its children, and remove the folder. Log failures."""
        try:
            await self.process.close(grace=grace)
        finally:
            await clean_up(self.launch, self.root)


async def start_environment(
    runtime: Runtime, launch_request: LaunchRequest, folders: Path, *, preload: bool
) -> RunningEnvironment:
    """Start the process of one session, in a new folder under `folders`.

    With `preload`, the process may be a fork of a process that has imported its libraries. Raises
    PrepareError, StartError or UsageError, after removing the folder.
    """
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
    """Remove the container or mounts of a stopped environment, and its folder. Log failures."""
    try:
        try:
            if launch is not None and launch.on_exit is not None:
                await launch.on_exit()
        finally:
            with contextlib.suppress(FileNotFoundError):  # a failed start has removed it
                await finish_in_thread(remove_tree, root)
    except Exception as error:
        log.warning("Cannot clean up %s: %s", root, error)


def is_larger(root: Path, max_bytes: int) -> bool:
    """Return True if the files under `root` use more than `max_bytes` bytes of disk.

    Count at least 4 KiB for each file and folder. Skip entries that disappear during the check.
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
    """Delete a folder, even with read-only subfolders or paths that exceed the path limit. Raises OSError.

    Move each subfolder to the top first, so that all paths stay short.
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
