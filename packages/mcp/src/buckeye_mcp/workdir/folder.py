"""The private folder of one rollout, which its servers and its graders share."""

from __future__ import annotations

import asyncio
import atexit
import functools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye_mcp.client.errors import StartError
from buckeye_mcp.config import GymConfig
from buckeye_mcp.gateway.starts import remove_tree
from buckeye_mcp.gateway.state import own_folder
from buckeye_mcp.sandbox.base import Places, cache_folder
from buckeye_mcp.tasks.task_schema import McpTask

WORKDIR = "{workdir}"
"""What stands for the folder wherever a task, a configuration or the model names a path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workdir:
    """A rollout's folder. `path` is where its servers start, and holds the task's files; `place` is around
    it, with what belongs to the rollout and is none of its files: home, temporary files, caches.

    `seconds` and `bytes` are what it took to put the files there.
    """

    place: Path
    seconds: float = 0.0
    bytes: int = 0

    @property
    def path(self) -> Path:
        """What `{workdir}` stands for."""
        return self.place / "work"

    def placed(self, value: Any) -> Any:
        """`value` with the folder's path for `{workdir}` in all its texts; keys of objects stay."""
        if isinstance(value, str):
            return value.replace(WORKDIR, str(self.path))
        if isinstance(value, Mapping):
            return {key: self.placed(item) for key, item in value.items()}
        return [self.placed(item) for item in value] if isinstance(value, list) else value

    def hidden(self, value: Any) -> Any:
        """`value` with `{workdir}` for the folder's path in all its texts: the same in every rollout."""
        if isinstance(value, str):
            return value.replace(str(self.path), WORKDIR)
        if isinstance(value, Mapping):
            return {key: self.hidden(item) for key, item in value.items()}
        return [self.hidden(item) for item in value] if isinstance(value, list) else value


@asynccontextmanager
async def open_workdir(task: McpTask, config: GymConfig) -> AsyncIterator[Workdir]:
    """A fresh folder with the files of the task, removed at the end of the block. Raises StartError if it
    cannot be made."""
    started = time.monotonic()
    del task, config
    try:
        place = _places().new()
        (place / "work").mkdir()
    except OSError as error:
        raise StartError(f"the rollout's folder cannot be made: {error}") from None
    try:
        yield Workdir(place=place, seconds=time.monotonic() - started)
    finally:
        await asyncio.to_thread(remove_tree, place)


@functools.cache
def _places() -> Places:
    """Those of this process: they end with it, and those of processes that were killed are removed."""
    stack = ExitStack()
    atexit.register(stack.close)
    return Places(stack.enter_context(own_folder(cache_folder().resolve() / "rollouts")))
