"""Where in somebody's code an error came about."""

from __future__ import annotations

import asyncio
import linecache
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_FRAMES = 20
_MAX_FRAME = 400
_OURS = (*sys.modules[__package__ or ""].__path__, str(Path(asyncio.__file__).parent))
_LIBRARY = re.compile(r"/(site-packages|lib/python3[.]\d+)/")


def frames_of(error: BaseException, *ours: str) -> list[str]:
    """The newest of the places that an error came through, outermost first, as `FILE:LINE in FUNCTION: CODE`.

    Those in the folders `ours`, in this package and in asyncio are left out, unless there are no others.
    """
    places = []
    frame = error.__traceback__
    while frame is not None:
        places.append((frame.tb_frame.f_code.co_filename, frame.tb_lineno, frame.tb_frame.f_code.co_name))
        frame = frame.tb_next
    theirs = [place for place in places if not place[0].startswith((*_OURS, *ours))]
    return [described(*place) for place in (theirs or places)[-MAX_FRAMES:]]


def described(file: str, line: int, function: str) -> str:
    """One frame, shortened if it is very long."""
    code = linecache.getline(file, line).strip()
    return f"{file}:{line} in {function}: {code}"[:_MAX_FRAME]


def place_of(frames: Sequence[str]) -> str:
    """` (FILE:LINE in FUNCTION)` of the innermost frame outside of libraries, of the innermost one if all are
    in libraries, nothing if there is none."""
    if not frames:
        return ""
    where = (own_frames(frames) or frames)[-1].partition(": ")[0]
    return f" ({where.rpartition('/')[2]})"


def own_frames(frames: Sequence[str]) -> list[str]:
    """Those outside of libraries."""
    return [frame for frame in frames if not _LIBRARY.search(frame)]


def checked_frames(value: Any) -> list[str]:
    """What another process says are frames, as far as they can be."""
    if not isinstance(value, list):
        return []
    return [str(frame)[:_MAX_FRAME] for frame in value[-MAX_FRAMES:]]
