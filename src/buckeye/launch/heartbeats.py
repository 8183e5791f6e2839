"""The launcher's end of the pipes through which its processes say how they are, and who of them hangs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from buckeye.config.supervision import SupervisionConfig


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
class HeartbeatReader:
    """Reads the heartbeats of a process: the `newest`, and `failure`, its last word; times are monotonic."""

    pipe: int
    started: float
    progressed: float
    newest: Heartbeat | None = None
    failure: Failure | None = None
    heard: float | None = None
    _rest: bytes = b""

    @classmethod
    def of(cls, pipe: int) -> HeartbeatReader:
        """The reader of a new process. It closes the pipe."""
        os.set_blocking(pipe, False)
        now = time.monotonic()
        return cls(pipe=pipe, started=now, progressed=now)

    @property
    def ready(self) -> bool:
        """Whether the process has said that it is."""
        return self.newest is not None and self.newest.ready

    @property
    def waits_on(self) -> str | None:
        """The kind of process that this one waits for; None if it works."""
        return self.newest.on if self.newest is not None else None

    @property
    def pulse(self) -> float | None:
        """When its event loop last turned; None if it has none."""
        return self.newest.pulse if self.newest is not None else None

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
        """Start to count again: nobody was listening."""
        self.started, self.progressed = max(self.started, now), now
        self.heard = now if self.heard is not None else None
        if self.newest is not None and self.newest.pulse is not None:
            self.newest = msgspec.structs.replace(self.newest, pulse=now)

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
        before, self.newest, self.heard = self.newest, message, now
        if message.on is not None or before is None or message.progress != before.progress:
            self.progressed = now


Illness = Literal["not_started", "silent", "stalled", "blocked"]


def illness(reader: HeartbeatReader, limits: SupervisionConfig, now: float) -> Illness | None:
    """What is wrong with a process; None if nothing is.

    "not_started": no first sign of life; "silent": none any more (it is suspended, or hangs for good);
    "stalled": it works and gets nowhere; "blocked": its event loop does not turn.
    """
    if reader.heard is None:
        return "not_started" if now - reader.started > limits.start_timeout else None
    if now - reader.heard > limits.heartbeat_timeout:
        return "silent"
    if reader.waits_on is None and now - reader.progressed > limits.stall_timeout:
        return "stalled"
    if reader.pulse is not None and now - reader.pulse > limits.stall_timeout:
        return "blocked"
    return None


def described(ill: Illness, reader: HeartbeatReader, doing: str, now: float) -> str:
    """`gave no sign of life for 31 s`, to be put after the name of the process."""
    if ill == "not_started":
        return f"gave no first sign of life within {now - reader.started:.0f} s of its start"
    if ill == "silent":
        return f"gave no sign of life for {now - (reader.heard or now):.0f} s (it said last: {doing})"
    if ill == "stalled":
        return f"made no progress for {now - reader.progressed:.0f} s (it said last: {doing})"
    return f"was blocked for {now - (reader.pulse or now):.0f} s by code that does not await (at: {doing})"
