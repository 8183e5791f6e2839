"""Restarts of inference servers and gateways that die, within limits; all other processes continue."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from buckeye.config.supervision import SupervisionConfig
from buckeye.errors import RunError, UsageError
from buckeye.launch.exit_reason import (
    OomKills,
    describe_exit,
    exit_error_code,
    explain_exit,
    find_reported_error,
)
from buckeye.launch.plan import Role
from buckeye.launch.processes import Child, Processes
from buckeye.transport.restart_requests import take_restart_requests

log = logging.getLogger(__name__)

FIRST_DELAY = 1.0
NODE_RETRY_SECONDS = 1.0
"""Delay before the next try if the node of a process was absent."""
_MAX_DELAY = 60.0
_MAX_REPEATED_ERRORS = 3


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart after `delay` seconds, the `count`th of at most `max_restarts`."""

    delay: float
    count: int
    max_restarts: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The decision not to restart, with the reason and the remedy."""

    reason: str
    hint: str | None = None


@dataclass(slots=True)
class RestartBudget:
    """Restart budget of one process, or of processes that restart together.

    Allows `max_restarts` restarts within `window` seconds. The delay starts at `first_delay` and doubles each
    time. Progress of the run refills the budget.
    """

    max_restarts: int
    window: float
    first_delay: float = FIRST_DELAY
    _ends: list[float] = field(default_factory=list)
    _last: tuple[str, int] | None = None
    _repeats: int = 0  # consecutive ends with the same cause, at most one step apart

    def decide(self, now: float, *, cause: str | None, step: int) -> Restart | GiveUp:
        """Return the decision after a process ended at the time `now`.

        `cause` is the error that the process itself reported, or None if it was killed. `step` is the
        number of steps that the run had finished.
        """
        if self.max_restarts == 0:
            return GiveUp("restarts are switched off (supervision.max_restarts = 0)")
        previous, self._last = self._last, None if cause is None else (cause, step)
        if cause is not None and previous == (cause, step):
            return GiveUp(f"the same error at step {step} ended it before")
        self._repeats = self._repeats + 1 if previous in ((cause, step - 1), (cause, step)) else 1
        if self._repeats >= _MAX_REPEATED_ERRORS:
            return GiveUp(f"the same error ended it at each of the last {self._repeats} steps")
        self._ends = [end for end in self._ends if now - end < self.window]
        if len(self._ends) >= self.max_restarts:
            return GiveUp(
                f"{self.max_restarts} restarts within {self.window / 60:g} minutes are the limit",
                "fix the cause, or raise `supervision.max_restarts`",
            )
        self._ends.append(now)
        count = len(self._ends)
        return Restart(min(_MAX_DELAY, self.first_delay * 2 ** (count - 1)), count, self.max_restarts)

    def refill(self) -> None:
        """Allow all restarts again, after progress of the run."""
        self._ends.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedProcess:
    """A process that ended and will be restarted: its title, and the cause in one line."""

    title: str
    cause: str


class Restarts:
    """Restarts the servers of a run: gateways, environment workers and inference.

    Also restarts inference servers on request of the orchestrator. Calls `note` at each end. A server that
    rejects its settings ends the run.
    """

    def __init__(
        self,
        processes: Processes,
        output_dir: Path,
        limits: SupervisionConfig,
        *,
        first_delay: float = FIRST_DELAY,
        note: Callable[[EndedProcess], None] = lambda ended: None,
    ) -> None:
        self._processes = processes
        self._output_dir = output_dir
        self._limits = limits
        self._first_delay = first_delay
        self._note = note
        self._oom_kills = OomKills.read()
        self._budgets: dict[str, RestartBudget] = {}
        self._due: list[tuple[float, Role]] = []
        take_restart_requests(output_dir)  # discard requests about the servers of an earlier start

    def tick(self, step: int) -> None:
        """Restart servers that ended or that are to be replaced; call it repeatedly.

        `step` is the number of finished steps. Raises RunError, with the last lines of the server, if a
        server ended too often.
        """
        for request in take_restart_requests(self._output_dir):
            for child in self._processes.of_kind("inference"):
                if request.url == child.role.url and child.running:
                    log.warning("Restarting %s on request: %s", child.role.title, request.reason)
                    self._processes.kill(child, f"was reported as faulty ({request.reason})")
        for child in self._processes.of_kind("gateway", "workers", "inference"):
            if (code := child.returncode) is not None:
                child.heartbeats.read(time.monotonic())
                self._schedule(child, code, step)
        now = time.monotonic()
        for due, role in [entry for entry in self._due if entry[0] <= now]:
            self._due.remove((due, role))
            self._start(role, now)

    def refill(self) -> None:
        """Refill all budgets, after progress of the run."""
        for budget in self._budgets.values():
            budget.refill()

    def _start(self, role: Role, now: float) -> None:
        if self._processes.absent([role]):  # the run continues without this server
            self._due.append((now + NODE_RETRY_SECONDS, role))
            return
        self._processes.start(role)

    def _schedule(self, child: Child, code: int, step: int) -> None:
        now = time.monotonic()
        text = explain_exit(child, code, self._oom_kills, self._output_dir)
        if not self._limits.restart or code == UsageError.exit_code:
            raise RunError(text, code=exit_error_code(child))
        budget = self._budgets.setdefault(
            child.role.title,
            RestartBudget(self._limits.max_restarts, self._limits.restart_window, self._first_delay),
        )
        decision = budget.decide(now, cause=find_reported_error(child, code), step=step)
        if isinstance(decision, GiveUp):
            raise RunError(
                f"{text}\nNot restarted: {decision.reason}", code=exit_error_code(child), hint=decision.hint
            )
        log.warning("%s\nRestarting it in %s", text, describe_restart(decision, self._limits))
        self._oom_kills = OomKills.read()
        self._note(EndedProcess(title=child.role.title, cause=describe_exit(child, code)))
        self._due.append((now + decision.delay, child.role))
        self._processes.forget(child)


def describe_restart(restart: Restart, limits: SupervisionConfig) -> str:
    """Return the delay and count as text: `1 s (restart 1 of at most 5 within 10 minutes)`."""
    return (
        f"{restart.delay:g} s (restart {restart.count} of at most {restart.max_restarts} within "
        f"{limits.restart_window / 60:g} minutes)"
    )
