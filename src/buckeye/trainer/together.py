"""Writing on one rank while the others wait for it, for as long as it takes."""

from __future__ import annotations

import time
from typing import TypeVar

from buckeye.process import stop_requested
from buckeye.space import Writing
from buckeye.trainer.distributed import Ranks

T = TypeVar("T")

_POLL_SECONDS = 0.5
_DONE, _WAIT, _STOP = range(3)


def write_together(ranks: Ranks, writing: Writing[T]) -> None:
    """Write on the first rank, as soon as there is room; all ranks must call it, and return together.

    None of them is in a collective during a wait for disk space, which may last longer than a collective may.
    Raises DiskFullError as `write_when_room` does.
    """
    with writing:
        while (verdict := ranks.max(_attempt(writing) if ranks.first else _DONE)) == _WAIT:
            time.sleep(_POLL_SECONDS)
    if verdict == _STOP:
        raise writing.stopped()


def _attempt(writing: Writing[T]) -> int:
    if writing.attempt():
        return _DONE
    return _STOP if stop_requested() else _WAIT
