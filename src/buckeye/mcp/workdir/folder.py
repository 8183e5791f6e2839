"""Create, keep and remove the private folder of one rollout. The rollout's servers and graders share it."""

from __future__ import annotations

import atexit
import functools
import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.threads import acquire_in_thread, finish_in_thread
from buckeye.errors import BuckeyeError
from buckeye.mcp.client.errors import StartError, TaskError
from buckeye.mcp.config import GymConfig
from buckeye.mcp.gateway.process_folder import open_process_folder
from buckeye.mcp.gateway.running_environment import remove_tree
from buckeye.mcp.sandbox.runtime import cache_folder
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.mcp.tasks.variables import map_strings
from buckeye.mcp.workdir.initial_files import SizeLimit, copy_tree, prepare_files

log = logging.getLogger(__name__)

WORKDIR = "{workdir}"
"""Placeholder for the path of the folder, in tasks, configurations and calls of the model."""
_PREPARE_LOCK = threading.Lock()
_PREPARED: dict[tuple[str, SizeLimit], Path] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workdir:
    """Folder of one rollout.

    `path` contains the task's files, and servers start there. `root` is the parent of `path`, and also
    contains the rollout's home folder, temporary files and caches. `seconds` and `bytes` are the duration and
    the size of the copy of the task's files. `limit` is the maximum size of `root` in bytes.
    """

    root: Path
    limit: int = 2**30
    seconds: float = 0.0
    bytes: int = 0

    @property
    def path(self) -> Path:
        """Path that replaces `{workdir}`."""
        return self.root / "work"

    @property
    def metrics(self) -> dict[str, float]:
        """Duration and size of the copy of the files, as components of an outcome. {} without files."""
        return {"workdir_seconds": self.seconds, "workdir_bytes": float(self.bytes)} if self.bytes else {}

    def expand_workdir(self, value: Any) -> Any:
        """Return `value` with `{workdir}` in its strings replaced by the path. Keys stay unchanged."""
        return map_strings(value, lambda text: text.replace(WORKDIR, str(self.path)))

    def mask_workdir(self, value: Any) -> Any:
        """Return `value` with the folder's path in its strings replaced by `{workdir}`.

        The result is then equal in all rollouts.
        """
        path, root = str(self.path), str(self.root)
        return map_strings(value, lambda text: text.replace(path, WORKDIR).replace(root, f"{WORKDIR}/.."))


@asynccontextmanager
async def open_workdir(task: McpTask, config: GymConfig) -> AsyncIterator[Workdir]:
    """Create a folder with the files of the task. At exit, delete the folder or move it to `keep_workdir`.

    Raises StartError if the creation fails, or TaskError if no retry can succeed.
    """
    limits = config.defaults
    try:
        files = task.files or config.files
        workdir = await acquire_in_thread(
            create_workdir,
            create_rollout_folder(),
            files,
            SizeLimit(limits.workdir_bytes, "defaults.workdir_bytes"),
            release=lambda created: _remove(created.root, task.id),
        )
    except BuckeyeError as error:
        kind = TaskError if error.final else StartError
        message = f"cannot create the rollout's folder: {error.message}"
        raise kind(message, code=error.code, at=error.at, hint=error.hint) from None
    except OSError as error:
        raise StartError(f"cannot create the rollout's folder: {error}", code="BK-ENV-FAILED") from None
    try:
        yield workdir
    finally:
        if limits.keep_workdir is None:
            await finish_in_thread(_remove, workdir.root, task.id)
        else:
            await finish_in_thread(_keep, workdir, Path(limits.keep_workdir), task.id)


def create_workdir(root: Path, files: str | None, limit: SizeLimit) -> Workdir:
    """Create a rollout's folder in the empty folder `root`, with a copy of `files`. Delete `root` on failure.

    Raises BuckeyeError or OSError.
    """
    started = time.monotonic()
    try:
        (root / "work").mkdir()
        copied = copy_tree(_prepare_once(files, limit), root / "work", limit) if files is not None else 0
    except BaseException:
        remove_tree(root)
        raise
    return Workdir(root=root, limit=limit.bytes, seconds=time.monotonic() - started, bytes=copied)


def _remove(root: Path, task: str) -> None:
    """Delete a rollout's folder. Only log a failure, so that the rollout keeps its reward."""
    try:
        remove_tree(root)
    except OSError as error:
        if root.exists():
            log.warning("Cannot remove the folder of a rollout of %s: %s: %s", task, root, error)


def _keep(workdir: Workdir, root: Path, task: str) -> None:
    name = re.sub(r"[^\w.-]+", "_", task).lstrip(".")[:80]
    target = root.absolute() / f"{name}-{workdir.root.name}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(workdir.root, target)
        log.info("Kept the folder of a rollout of %s: %s", task, target / "work")
    except OSError as error:
        log.warning("Cannot keep the folder of a rollout of %s: %s", task, error)
        _remove(workdir.root, task)


def _prepare_once(files: str, limit: SizeLimit) -> Path:
    """Return a folder with a copy of the files. The first call makes the copy, and later calls reuse it."""
    with _PREPARE_LOCK:
        if (files, limit) not in _PREPARED:
            folder = create_rollout_folder()
            try:
                prepare_files(files, folder, limit)
            except BaseException:
                remove_tree(folder)
                raise
            _PREPARED[files, limit] = folder
        return _PREPARED[files, limit]


def create_rollout_folder() -> Path:
    """Create an empty folder. Buckeye deletes it when this process exits."""
    return Path(tempfile.mkdtemp(dir=_process_folder()))


@functools.cache
def _process_folder() -> Path:
    """Return the folder for all rollout folders of this process. First delete those of killed processes."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(open_process_folder(cache_folder().resolve() / "rollouts"))
