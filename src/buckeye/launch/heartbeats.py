"""The launcher's end of the heartbeat pipes, and the detection of processes that hang."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from buckeye.config.supervision import SupervisionConfig


class Heartbeat(msgspec.Struct, kw_only=True, frozen=True):
    """The newest heartbeat of a process; `buckeye.base.heartbeat` defines the fields.

    `since` and `pulse` are on the monotonic clock.
    """

    pid: int
    progress: int
    doing: str
    on: str | None
    since: float
    pulse: float | None = None
    ready: bool = False


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """The error that ended a process, as the process itself reported it."""

    message: str
    error: str
    final: bool
    code: str


class _FailureMessage(msgspec.Struct, kw_only=True):
    failed: Failure


HealthProblem = Literal["not_started", "silent", "stalled", "blocked"]


@dataclass(slots=True)
class HeartbeatReader:
    """Reads the heartbeats of a process.

    `newest` is the last heartbeat, `failure` the error that it reported before it ended. Times are monotonic.
    """

    pipe: int
    started: float
    progressed: float
    newest: Heartbeat | None = None
    failure: Failure | None = None
    last_heartbeat: float | None = None
    _rest: bytes = b""

    @classmethod
    def of(cls, pipe: int) -> HeartbeatReader:
        """Return the reader of a new process; it takes over the pipe and closes it."""
        os.set_blocking(pipe, False)
        now = time.monotonic()
        return cls(pipe=pipe, started=now, progressed=now)

    @property
    def ready(self) -> bool:
        """True once the process has reported that it is ready."""
        return self.newest is not None and self.newest.ready

    @property
    def waits_on(self) -> str | None:
        """Kind of process that this one waits for, or None if it works."""
        return self.newest.on if self.newest is not None else None

    @property
    def pulse(self) -> float | None:
        """Time of the last turn of its event loop, or None if it has no loop."""
        return self.newest.pulse if self.newest is not None else None

    def read(self, now: float) -> None:
        """Read all heartbeats that have arrived, without waiting."""
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
            self._process_line(line, now)

    def restart_deadlines(self, now: float) -> None:
        """Restart all deadlines at `now`, because no heartbeats were read for a while."""
        self.started, self.progressed = max(self.started, now), now
        self.last_heartbeat = now if self.last_heartbeat is not None else None
        if self.newest is not None and self.newest.pulse is not None:
            self.newest = msgspec.structs.replace(self.newest, pulse=now)

    def close(self) -> None:
        """Close the pipe."""
        if self.pipe >= 0:
            os.close(self.pipe)
        self.pipe = -1

    def _process_line(self, line: bytes, now: float) -> None:
        try:
            kind = _FailureMessage if b'"failed"' in line[:12] else Heartbeat
            message: Any = msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError:  # an incomplete line: the process was killed while it wrote
            return
        if isinstance(message, _FailureMessage):
            self.failure = message.failed
            return
        previous, self.newest, self.last_heartbeat = self.newest, message, now
        if message.on is not None or previous is None or message.progress != previous.progress:
            self.progressed = now


def find_health_problem(
    reader: HeartbeatReader, limits: SupervisionConfig, now: float
) -> HealthProblem | None:
    """Return the reason why a process is unhealthy, or None if it is healthy.

    "not_started": no first heartbeat within the start timeout. "silent": its heartbeats ended, because it is
    suspended or hangs. "stalled": it works but makes no progress. "blocked": its event loop does not run.
    """
    if reader.last_heartbeat is None:
        return "not_started" if now - reader.started > limits.start_timeout else None
    if now - reader.last_heartbeat > limits.heartbeat_timeout:
        return "silent"
    if reader.waits_on is None and now - reader.progressed > limits.stall_timeout:
        return "stalled"
    if reader.pulse is not None and now - reader.pulse > limits.stall_timeout:
        return "blocked"
    return None


def describe_health_problem(problem: HealthProblem, reader: HeartbeatReader, doing: str, now: float) -> str:
    """Return a predicate for messages, to follow the title: `sent no heartbeat for 31 s`."""
    if problem == "not_started":
        return f"sent no heartbeat within {now - reader.started:.0f} s of its start"
    if problem == "silent":
        silence = now - (reader.last_heartbeat or now)
        return f"sent no heartbeat for {silence:.0f} s (last activity: {doing})"
    if problem == "stalled":
        return f"made no progress for {now - reader.progressed:.0f} s (last activity: {doing})"
    blocked = now - (reader.pulse or now)
    return f"was blocked for {blocked:.0f} s by code that does not await (last activity: {doing})"
