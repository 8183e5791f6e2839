"""Supervision of a run's processes: kill those that hang, restart those that die, report stalls."""

from __future__ import annotations

import logging
import time

from buckeye.launch.attempts import Attempts, RunLaunch
from buckeye.launch.heartbeats import describe_health_problem, find_health_problem
from buckeye.launch.plan import RolePlan
from buckeye.launch.processes import Processes
from buckeye.launch.progress import human_duration
from buckeye.launch.recorder import Recorder
from buckeye.launch.restarts import Restarts
from buckeye.launch.waits import current_waits, describe_wait
from buckeye.transport.checkpoint import checkpoints_oldest_first

log = logging.getLogger(__name__)

_GAP_SECONDS = 5.0
_LOOK_SECONDS = 2.0
_STACK_SECONDS = 2.0  # between the signal that requests stacks and the kill
_PROGRESS_STEPS = 3


class Supervisor:
    """Starts the processes of a run and supervises them until they finish."""

    def __init__(self, launch: RunLaunch, plan: RolePlan, processes: Processes, recorder: Recorder) -> None:
        self._launch = launch
        self._processes = processes
        self._recorder = recorder
        self._limits = launch.config.supervision
        self._attempts = Attempts(
            launch, plan, processes, record_attempt=recorder.record_attempt, note=recorder.record_restart
        )
        self._restarts = Restarts(
            processes, launch.config.output_dir, self._limits, note=recorder.record_restart
        )
        now = time.monotonic()
        self._ticked = self._stepped = now
        self._look_at = now
        self._told = False
        self._doomed: dict[tuple[int, int], float] = {}
        self._trained = 0
        self._furthest = self._committed = launch.step or 0
        self._refilled_at = self._furthest

    def start(self) -> None:
        """Start every process and log each kind with its devices."""
        plan = self._attempts.plan
        where = "GPU(s)" if plan.on_gpu else "CPU slot(s)"
        for kind in ("gateway", "workers", "inference", "orchestrator", "trainer"):
            roles = plan.of_kind(kind)
            devices = " ".join(str(device) for role in roles for device in role.devices)
            if roles:
                log.info("Starting %s process%s", kind, f" on {where} {devices}" if devices.strip() else "")
            for role in roles:
                self._processes.start(role)

    def tick(self, *, step: int, trained: int) -> bool:
        """Run one supervision tick and return True once the run has finished; call it repeatedly.

        `step` is the number of finished steps; `trained` also counts steps that were repeated after a
        restart. Raises RunError if the run cannot continue.
        """
        now = time.monotonic()
        for child in self._processes.children:
            child.heartbeats.read(now)
        self._forgive_a_gap(now)
        self._notice_progress(now, step, trained)
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            self._look(now)
        self._end_the_ill(now)
        self._restarts.tick(step)
        self._attempts.tick(now, step)
        self._recorder.observe(self._processes)
        working = self._attempts.members
        return self._attempts.running and all(child.returncode == 0 for child in working)

    def _forgive_a_gap(self, now: float) -> None:
        """Restart all deadlines if this process was suspended, because no heartbeats were read meanwhile."""
        gap, self._ticked = now - self._ticked, now
        if gap > _GAP_SECONDS:
            log.info("The launcher did nothing for %s: all deadlines start again", human_duration(gap))
            for child in self._processes.children:
                child.heartbeats.restart_deadlines(now)
            self._stepped = now

    def _notice_progress(self, now: float, step: int, trained: int) -> None:
        if trained > self._trained:
            self._trained, self._stepped, self._told = trained, now, False
        self._furthest = max(self._furthest, step)
        if self._furthest >= self._refilled_at + _PROGRESS_STEPS:
            self._refill()

    def _refill(self) -> None:
        self._refilled_at = self._furthest
        self._restarts.refill()
        self._attempts.refill()

    def _look(self, now: float) -> None:
        """Run the checks that need not run at every tick: memory, new checkpoints, stalls."""
        for child in self._processes.children:
            child.memory = child.process.memory() or child.memory
        commits = checkpoints_oldest_first(self._launch.config.output_dir / "checkpoints")
        newest = max(
            (info.step for info in commits if info.attempt >= self._launch.first_attempt.attempt), default=0
        )
        if newest > self._committed:
            self._committed = newest
            self._refill()
        patience = self._limits.stall_timeout / 2
        if now - self._stepped > patience and not self._told:
            self._told = True
            self._tell_the_stall(now)

    def _end_the_ill(self, now: float) -> None:
        """Kill processes that hang; request their Python stacks first."""
        before, self._doomed = self._doomed, {}
        for child in self._processes.children:
            ill = find_health_problem(child.heartbeats, self._limits, now)
            if ill is None or not child.running or child.kill_reason is not None:
                continue
            at = self._doomed[child.key] = before.get(child.key, now + _STACK_SECONDS)
            if child.key not in before:
                self._processes.request_stacks(child)
            elif now >= at:
                newest = child.heartbeats.newest
                doing = newest.doing if newest is not None else "nothing"
                self._processes.kill(child, describe_health_problem(ill, child.heartbeats, doing, now))

    def _tell_the_stall(self, now: float) -> None:
        waits = current_waits(self._processes.children)
        lines = [f"  {describe_wait(wait, now)}" for wait in waits]
        for child in self._processes.children:
            self._processes.request_stacks(child)
            lines.append(f"  {child.role.title}: its Python stacks are in {child.stdout}")
        log.warning(
            "No step was finished for %s. Who waits for whom:\n%s",
            human_duration(now - self._stepped),
            "\n".join(lines),
        )
        seconds = round(now - self._stepped, 1)
        self._recorder.note("stall", seconds=seconds, waits=[describe_wait(wait, now) for wait in waits])
