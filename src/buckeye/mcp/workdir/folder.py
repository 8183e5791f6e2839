"""Private folder of one rollout, shared by its servers and graders."""

from __future__ import annotations

import atexit
import functools
import logging
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.threads import acquire_in_thread, finish_in_thread
from buckeye.errors import UsageError
from buckeye.mcp.client.errors import StartError, TaskError
from buckeye.mcp.config import GymConfig
from buckeye.mcp.gateway.starts import remove_tree
from buckeye.mcp.gateway.state import own_folder
from buckeye.mcp.sandbox.base import Places, cache_folder
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.mcp.tasks.variables import with_texts
from buckeye.mcp.workdir.files import copy_tree, prepare

log = logging.getLogger(__name__)

WORKDIR = "{workdir}"
"""Placeholder for the folder in paths of tasks, configurations and the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workdir:
    """Folder of one rollout.

    `path` has the task's files; servers start there. `place` is its parent, with other data of the rollout:
    home folder, temporary files, caches. `seconds` and `bytes` are the cost of copying the files. `limit` is
    the maximum size in bytes.
    """

    place: Path
    limit: int = 2**30
    seconds: float = 0.0
    bytes: int = 0

    @property
    def path(self) -> Path:
        """Path that replaces `{workdir}`."""
        return self.place / "work"

    @property
    def numbers(self) -> dict[str, float]:
        """Components of the rollout, if files were copied."""
        return {"workdir_seconds": self.seconds, "workdir_bytes": float(self.bytes)} if self.bytes else {}

    def placed(self, value: Any) -> Any:
        """Return `value` with `{workdir}` in its strings replaced by the path. Keys stay unchanged."""
        return with_texts(value, lambda text: text.replace(WORKDIR, str(self.path)))

    def hidden(self, value: Any) -> Any:
        """Return `value` with the folder's path in its strings replaced by `{workdir}`.

        The result is then equal in all rollouts.
        """
        path, place = str(self.path), str(self.place)
        return with_texts(value, lambda text: text.replace(path, WORKDIR).replace(place, f"{WORKDIR}/.."))


@asynccontextmanager
async def open_workdir(task: McpTask, config: GymConfig) -> AsyncIterator[Workdir]:
    """Create a folder with the files of the task.

    At the end of the block it is deleted, or moved to the folder `keep_workdir` of the configuration. Raises
    StartError if it cannot be created: TaskError if its files cannot be used.
    """
    limits = config.defaults
    try:
        files = task.files or config.files
        workdir = await acquire_in_thread(
            made_workdir,
            places().new(),
            files,
            limits.workdir_bytes,
            release=lambda made: _remove(made.place, task.id),
        )
    except (OSError, UsageError) as error:
        kind = TaskError if isinstance(error, UsageError) else StartError
        raise kind(f"the rollout's folder cannot be made: {error}") from None
    try:
        yield workdir
    finally:
        if limits.keep_workdir is None:
            await finish_in_thread(_remove, workdir.place, task.id)
        else:
            await finish_in_thread(_keep, workdir, Path(limits.keep_workdir), task.id)


def made_workdir(place: Path, files: str | None, most: int) -> Workdir:
    """Create a rollout's folder in an empty `place`, which is deleted on failure.

    Raises UsageError and OSError.
    """
    started = time.monotonic()
    try:
        (place / "work").mkdir()
        copied = copy_tree(_prepared(files, most), place / "work", most) if files is not None else 0
    except BaseException:
        remove_tree(place)
        raise
    return Workdir(place=place, limit=most, seconds=time.monotonic() - started, bytes=copied)


def _remove(place: Path, task: str) -> None:
    """Delete a rollout's folder. A failure is only logged, so that the rollout keeps its reward."""
    try:
        remove_tree(place)
    except OSError as error:
        if place.exists():
            log.warning("The folder of a rollout of %s cannot be removed: %s: %s", task, place, error)


def _keep(workdir: Workdir, root: Path, task: str) -> None:
    name = re.sub(r"[^\w.-]+", "_", task).lstrip(".")[:80]
    kept = root.absolute() / f"{name}-{workdir.place.name}"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(workdir.place, kept)
        log.info("The folder of a rollout of %s is kept: %s", task, kept / "work")
    except OSError as error:
        log.warning("The folder of a rollout of %s cannot be kept: %s", task, error)


_PREPARING = threading.Lock()
_READY: dict[tuple[str, int], Path] = {}


def _prepared(files: str, most: int) -> Path:
    """Return a prepared copy of the files, made at first use, so that later changes reach no rollout."""
    with _PREPARING:
        if (files, most) not in _READY:
            folder = places().new()
            prepare(files, folder, most)
            _READY[files, most] = folder
        return _READY[files, most]


@functools.cache
def places() -> Places:
    """Return this process's root of rollout folders, deleted at exit.

    Folders of killed processes are deleted first.
    """
    stack = ExitStack()
    atexit.register(stack.close)
    return Places(stack.enter_context(own_folder(cache_folder().resolve() / "rollouts")))
