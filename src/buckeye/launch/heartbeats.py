"""Read the heartbeats of processes from their pipes, and detect processes that hang."""

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
    """The error that ended a process. The process reported it through its heartbeat pipe."""

    message: str
    error: str
    final: bool
    code: str


class _FailureMessage(msgspec.Struct, kw_only=True):
    failed: Failure


_BLOCKED = "was blocked for {:.0f} s by code that does not await"
HealthProblem = Literal["not_started", "silent", "stalled", "blocked"]


@dataclass(slots=True)
class HeartbeatReader:
    """Reads the heartbeats of a process.

    `newest` is the last heartbeat. `failure` is the error that the process reported before it ended. Times
    are seconds of the monotonic clock.
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
        """Return a reader for a process that has just started. The reader owns the pipe, and closes it."""
        os.set_blocking(pipe, False)
        now = time.monotonic()
        return cls(pipe=pipe, started=now, progressed=now)

    @property
    def ready(self) -> bool:
        """True once the process has reported that it is ready."""
        return self.newest is not None and self.newest.ready

    @property
    def waits_on(self) -> str | None:
        """Kind of process that this process waits for, or None if it does not wait."""
        return self.newest.on if self.newest is not None else None

    @property
    def pulse(self) -> float | None:
        """Last time at which the event loop of the process ran, or None if it has no event loop."""
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
) -> tuple[HealthProblem, str] | None:
    """Return the reason why a process is unhealthy, as a kind and as a text, or None if it is healthy.

    - "not_started": the process sent no heartbeat within the start timeout.
    - "silent": the process sends no more heartbeats, because it is suspended or hangs.
    - "stalled": the process sends heartbeats but makes no progress.
    - "blocked": the event loop of the process does not run.

    The text is a predicate that follows the title of the process in messages: `sent no heartbeat for 31 s`.
    """
    if reader.last_heartbeat is None:
        seconds = now - reader.started
        is_late = seconds > limits.start_timeout
        return ("not_started", f"sent no heartbeat within {seconds:.0f} s of its start") if is_late else None
    progressed = reader.progressed if reader.waits_on is None else None
    deadlines: tuple[tuple[HealthProblem, float | None, float, str], ...] = (
        ("silent", reader.last_heartbeat, limits.heartbeat_timeout, "sent no heartbeat for {:.0f} s"),
        ("stalled", progressed, limits.stall_timeout, "made no progress for {:.0f} s"),
        ("blocked", reader.pulse, limits.stall_timeout, _BLOCKED),
    )
    for problem, since, timeout, predicate in deadlines:
        if since is not None and now - since > timeout:
            doing = reader.newest.doing if reader.newest is not None else "unknown"
            return problem, f"{predicate.format(now - since)} (last activity: {doing})"
    return None
