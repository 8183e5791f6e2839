"""Who holds up the event loop: while one rollout computes or sleeps without awaiting, no other is played."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType

from buckeye.envs.workers.guest.traces import described, own_frames, place_of

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_HELD_UP = 0.2  # seconds between two turns of the loop that are no rollout's ordinary work
_TOLD_AFTER = 1.0  # seconds that were lost in one function
_OURS = (str(Path(__file__).parents[1]), str(Path(asyncio.__file__).parent))


class LoopWatch:
    """Looks at an event loop from a thread of its own, between `start`, which is called in it, and `stop`.

    `playing` is the code of the function that plays a rollout, whose variable `env` has the environment's
    name. `tell` is called in the loop with the environment, the place in its code and the seconds, once for
    each function that has cost a second; the environment is "" where a task of its own held up the loop.
    """

    def __init__(self, playing: CodeType, tell: Callable[[str, str, float], None]) -> None:
        self._playing = playing
        self._tell = tell
        self._turned = self._seen = 0.0  # when the loop has turned; until when what was lost is counted
        self._lost: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._told: set[tuple[str, str]] = set()
        self._ended = threading.Event()
        self._seconds = 0.0

    def start(self) -> None:
        """Begin to look."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._turn()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()

    def take_seconds(self) -> float:
        """For how many seconds the loop was held up since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _turn(self) -> None:
        self._turned = time.monotonic()
        if not self._ended.is_set():
            self._loop.call_later(_LOOK_SECONDS, self._turn)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            now = time.monotonic()
            since = max(self._turned, self._seen)
            if now - self._turned > _HELD_UP:
                self._count(now - since)
                self._seen = now

    def _count(self, seconds: float) -> None:
        self._seconds += seconds
        frame = sys._current_frames().get(self._thread_id)
        who = None if frame is None else self._culprit(frame)
        if who is None:
            return
        self._lost[who] += seconds
        if self._lost[who] >= _TOLD_AFTER and who not in self._told:
            self._told.add(who)
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell, *who, self._lost[who])

    def _culprit(self, frame: FrameType) -> tuple[str, str] | None:
        """The environment whose rollout runs, and the place in its code; None if it is none of that."""
        frames, name = list[str](), ""
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is self._playing:
                name = at.f_locals["env"].name
                break
            if not at.f_code.co_filename.startswith(_OURS):
                frames.insert(0, described(at.f_code.co_filename, at.f_lineno, at.f_code.co_name))
            at = at.f_back
        place = place_of(frames if name else own_frames(frames)).strip(" ()")
        return (name, place) if place else None


def tell_of_a_held_up_loop(env_name: str, place: str, seconds: float) -> None:
    """Warn, with what to do."""
    log.warning(
        "%s has held up all other rollouts for %.1f s so far, in %s. Let it wait with `await` "
        "(asyncio.sleep, asynchronous clients, asyncio.to_thread), or give it processes of its own: "
        'isolation = "process" and workers = N in its [[orchestrator.env]]',
        f"Environment {env_name}" if env_name else "An environment",
        seconds,
        place,
    )
