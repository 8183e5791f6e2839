"""The launcher's end of the pipes through which its processes say how they are."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from buckeye.launch.hangs import Vitals


class Heartbeat(msgspec.Struct, kw_only=True, frozen=True):
    """What a process said last; see `buckeye.base.heartbeat`. `since` and `pulse` are on the
    monotonic clock."""

    pid: int
    progress: int
    doing: str
    on: str | None
    since: float
    pulse: float | None = None
    ready: bool = False


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """Why a process ended, in its own words."""

    message: str
    error: str
    final: bool


class _Last(msgspec.Struct, kw_only=True):
    failed: Failure


@dataclass(slots=True)
class BeatReader:
    """Reads the beats of one process. `beat` is the newest, `failure` its last word; times are monotonic."""

    pipe: int
    started: float
    progressed: float
    beat: Heartbeat | None = None
    failure: Failure | None = None
    heard: float | None = None
    _rest: bytes = b""

    @classmethod
    def of(cls, pipe: int) -> BeatReader:
        """The reader of a new process. It closes the pipe."""
        os.set_blocking(pipe, False)
        now = time.monotonic()
        return cls(pipe=pipe, started=now, progressed=now)

    @property
    def ready(self) -> bool:
        """Whether the process has said that it is."""
        return self.beat is not None and self.beat.ready

    @property
    def vitals(self) -> Vitals:
        """What its health is judged by."""
        return Vitals(
            started=self.started,
            heard=self.heard,
            progressed=self.progressed,
            waits_on=self.beat.on if self.beat is not None else None,
            pulse=self.beat.pulse if self.beat is not None else None,
        )

    def read(self, now: float) -> None:
        """Take in what has come; never waits."""
        data = b""
        while self.pipe >= 0:
            try:
                chunk = os.read(self.pipe, 65536)
            except BlockingIOError:
                break
            if not chunk:
                self.close()
            data += chunk
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line, now)

    def forgive(self, now: float) -> None:
        """Begin to count anew: nobody was listening."""
        self.started, self.progressed = max(self.started, now), now
        self.heard = now if self.heard is not None else None
        if self.beat is not None and self.beat.pulse is not None:
            self.beat = msgspec.structs.replace(self.beat, pulse=now)

    def close(self) -> None:
        """Listen no more."""
        if self.pipe >= 0:
            os.close(self.pipe)
        self.pipe = -1

    def _take(self, line: bytes, now: float) -> None:
        try:
            message: Any = msgspec.json.decode(line, type=_Last if b'"failed"' in line[:12] else Heartbeat)
        except msgspec.MsgspecError:  # of a process that was killed while it wrote
            return
        if isinstance(message, _Last):
            self.failure = message.failed
            return
        before, self.beat, self.heard = self.beat, message, now
        if message.on is not None or before is None or message.progress != before.progress:
            self.progressed = now
