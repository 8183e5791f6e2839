"""Inference servers and gateways that die are started again, within limits; everything else goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from buckeye.config.supervision import SupervisionConfig
from buckeye.errors import RunError, UsageError
from buckeye.run.budget import FIRST_DELAY, Again, Budget, GiveUp
from buckeye.run.diagnosis import Memory, diagnosis, how_it_ended, named_cause
from buckeye.run.plan import Role
from buckeye.run.processes import Child, Processes
from buckeye.space import disk_is_full
from buckeye.transport.restarts import take_restart_requests

log = logging.getLogger(__name__)

FULL_DISK_SECONDS = 10.0
"""Until a start is tried again for which there was no disk space."""

NODE_SECONDS = 1.0
"""Until a start is tried again for which a node was not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A process that has ended and will be started again: what it is called, why it ended in one line, when
    on the monotonic clock, and whether the attempt ends with it."""

    title: str
    cause: str
    at: float
    ends_attempt: bool = False


class Restarts:
    """Starts the servers of a run anew: inference and gateways that have ended, and inference that the
    orchestrator asks for. `note` is told of each end. A server that refuses its settings ends the run."""

    def __init__(
        self,
        processes: Processes,
        output_dir: Path,
        limits: SupervisionConfig,
        *,
        first_delay: float = FIRST_DELAY,
        note: Callable[[Ended], None] = lambda ended: None,
    ) -> None:
        self._processes = processes
        self._output_dir = output_dir
        self._limits = limits
        self._first_delay = first_delay
        self._note = note
        self._memory = Memory.now()
        self._budgets: dict[str, Budget] = {}
        self._due: list[tuple[float, Role]] = []
        take_restart_requests(output_dir)  # those of an earlier start are not for these servers

    def tend(self, step: int) -> list[Child]:
        """Look after the servers of a run that has done `step` steps; to be called again and again. Returns
        those that cannot have their port: they are not started again. Raises RunError with the last lines of
        a server that ended too often."""
        for request in take_restart_requests(self._output_dir):
            for child in self._processes.of_kind("inference"):
                if request.url == child.role.url and child.running:
                    log.warning("%s is ended to be started anew: %s", child.role.title, request.reason)
                    self._processes.kill(child, f"was not right ({request.reason})")
        homeless = []
        for child in self._processes.of_kind("gateway", "inference"):
            code = child.returncode
            if code is None:
                continue
            child.beats.read(time.monotonic())
            failure = child.beats.failure
            if child.role.kind == "inference" and failure and failure.error == "PortTakenError":
                homeless.append(child)
            self._schedule(child, code, step)
        now = time.monotonic()
        for due in [due for due in self._due if due[0] <= now]:
            self._due.remove(due)
            self._start(due[1], now)
        return homeless

    def refill(self) -> None:
        """The run has made progress."""
        for budget in self._budgets.values():
            budget.refill()

    def move(self, roles: list[Role]) -> None:
        """Use these roles, which have other ports, for servers that are to be started again."""
        moved = {role.index: role for role in roles}
        self._due = [(at, moved[role.index] if role.kind == "inference" else role) for at, role in self._due]

    def _start(self, role: Role, now: float) -> None:
        if self._processes.absent([role]):  # the run goes on without it, as long as it can
            self._due.append((now + NODE_SECONDS, role))
            return
        try:
            self._processes.start(role)
        except OSError as error:  # its log is a new file if an attempt has begun meanwhile
            if not disk_is_full(error):
                raise
            log.warning("The disk is full: %s is started when there is space (%s)", role.title, error)
            self._due.append((now + FULL_DISK_SECONDS, role))

    def _schedule(self, child: Child, code: int, step: int) -> None:
        now = time.monotonic()
        how = how_it_ended(child, code)
        if not self._limits.restart or code == UsageError.exit_code:
            raise RunError(diagnosis(child, code, self._memory, self._output_dir))
        budget = self._budgets.setdefault(
            child.role.title,
            Budget(self._limits.max_restarts, self._limits.restart_window, self._first_delay),
        )
        verdict = budget.after(now, cause=named_cause(child, code), step=step)
        if isinstance(verdict, GiveUp):
            raise RunError(f"{diagnosis(child, code, self._memory, self._output_dir)}\n{verdict.why}")
        log.warning(
            "%s\nStarting it again in %s",
            diagnosis(child, code, self._memory, self._output_dir),
            described(verdict, self._limits),
        )
        self._memory = Memory.now()
        self._note(Ended(title=child.role.title, cause=how, at=now))
        self._due.append((now + verdict.delay, child.role))
        self._processes.forget(child)


def described(again: Again, limits: SupervisionConfig) -> str:
    """`1 s, for the 1. of at most 5 times within 10 minutes`."""
    return (
        f"{again.delay:g} s, for the {again.count}. of at most {again.most} times within "
        f"{limits.restart_window / 60:g} minutes"
    )
