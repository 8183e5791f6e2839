"""Supervise the processes of a run: kill hanging processes, restart failed ones, report stalls."""

from __future__ import annotations

import logging
import time

from buckeye.launch.attempts import Attempts, RunLaunch
from buckeye.launch.heartbeats import find_health_problem
from buckeye.launch.plan import RolePlan
from buckeye.launch.processes import Processes
from buckeye.launch.progress import human_duration
from buckeye.launch.recorder import Recorder
from buckeye.launch.restarts import Restarts
from buckeye.launch.waits import describe_wait, waits
from buckeye.run_files.directory import RUN_FILE, DirectoryLostError, check_owner
from buckeye.transport.checkpoint import checkpoints_oldest_first

log = logging.getLogger(__name__)

_GAP_SECONDS = 5.0
_CHECK_SECONDS = 2.0
_STACK_SECONDS = 2.0  # time for a hanging process to write its stacks before it is killed
_PROGRESS_STEPS = 3
_LOST_SECONDS = 6.0  # a shared file system may hide a directory for a moment


class Supervisor:
    """Starts the processes of a run and supervises them until they finish."""

    def __init__(self, launch: RunLaunch, plan: RolePlan, processes: Processes, recorder: Recorder) -> None:
        self._launch = launch
        self._processes = processes
        self._recorder = recorder
        self._limits = launch.config.supervision
        self._attempts = Attempts(launch, plan, processes, recorder)
        self._restarts = Restarts(
            processes, launch.config.output_dir, self._limits, note=recorder.record_restart
        )
        now = time.monotonic()
        self._ticked = self._stepped = self._owned = now
        self._next_check = now
        self._is_stall_reported = False
        self._kill_times: dict[tuple[int, int], float] = {}
        self._trained = 0
        self._furthest = self._committed = launch.step or 0
        self._refilled_at = self._furthest

    def start(self) -> None:
        """Start every process, and log one line per kind of process with its devices."""
        plan = self._attempts.plan
        device_kind = "GPU(s)" if plan.on_gpu else "CPU slot(s)"
        for kind in ("gateway", "workers", "inference", "orchestrator", "trainer"):
            roles = plan.of_kind(kind)
            devices = " ".join(str(device) for role in roles for device in role.devices)
            if roles:
                log.info(
                    "Starting %s process%s", kind, f" on {device_kind} {devices}" if devices.strip() else ""
                )
            for role in roles:
                self._processes.start(role)

    def tick(self, *, step: int, trained: int) -> bool:
        """Check all processes once, and return True if the run has finished. Call it repeatedly.

        `step` is the number of finished steps. `trained` also counts steps that a restart repeated. Raises
        RunError if the run cannot continue.
        """
        now = time.monotonic()
        for child in self._processes.children:
            child.heartbeats.read(now)
        self._restart_deadlines_after_gap(now)
        self._observe_progress(now, step, trained)
        if now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            self._run_slow_checks(now)
        self._kill_unhealthy(now)
        self._restarts.tick(step)
        self._attempts.tick(now, step)
        self._recorder.observe(self._processes)
        return self._attempts.running and all(child.returncode == 0 for child in self._attempts.members)

    def _restart_deadlines_after_gap(self, now: float) -> None:
        """Restart all deadlines if this process was suspended, because it then read no heartbeats."""
        gap, self._ticked = now - self._ticked, now
        if gap > _GAP_SECONDS:
            log.info("The launcher was suspended for %s: restarting all deadlines", human_duration(gap))
            for child in self._processes.children:
                child.heartbeats.restart_deadlines(now)
            self._stepped = self._owned = now

    def _observe_progress(self, now: float, step: int, trained: int) -> None:
        if trained > self._trained:
            self._trained, self._stepped, self._is_stall_reported = trained, now, False
        self._furthest = max(self._furthest, step)
        if self._furthest >= self._refilled_at + _PROGRESS_STEPS:
            self._refill_restart_budgets()

    def _refill_restart_budgets(self) -> None:
        self._refilled_at = self._furthest
        self._restarts.refill()
        self._attempts.refill()

    def _run_slow_checks(self, now: float) -> None:
        """Check the directory, memory, new checkpoints and stalls every 2 s, because this is slow."""
        self._check_directory(now)
        for child in self._processes.children:
            child.memory = child.process.memory() or child.memory
        commits = checkpoints_oldest_first(self._launch.config.output_dir / "checkpoints")
        newest = max(
            (info.step for info in commits if info.attempt >= self._launch.first_attempt.attempt), default=0
        )
        if newest > self._committed:
            self._committed = newest
            self._refill_restart_budgets()
        if now - self._stepped > self._limits.stall_timeout / 2 and not self._is_stall_reported:
            self._is_stall_reported = True
            self._report_stall(now)

    def _check_directory(self, now: float) -> None:
        """Raise `DirectoryLostError` if the directory has another run, or stays away."""
        folder = self._launch.config.output_dir
        try:
            check_owner(folder, self._launch.first_attempt.run_id)
            self._owned = now
        except DirectoryLostError:
            if (folder / RUN_FILE).exists() or now - self._owned >= _LOST_SECONDS:
                raise

    def _kill_unhealthy(self, now: float) -> None:
        """Request the Python stacks of processes that hang, and kill these processes 2 s later."""
        previous, self._kill_times = self._kill_times, {}
        for child in self._processes.children:
            problem = find_health_problem(child.heartbeats, self._limits, now)
            if problem is None or not child.running or child.kill_reason is not None:
                continue
            kill_time = self._kill_times[child.key] = previous.get(child.key, now + _STACK_SECONDS)
            if child.key not in previous:
                self._processes.request_stacks(child)
            elif now >= kill_time:
                self._processes.kill(child, problem[1])

    def _report_stall(self, now: float) -> None:
        texts = [describe_wait(wait, time.time()) for wait in waits(self._recorder.record)]
        lines = [f"  {text}" for text in texts]
        for child in self._processes.children:
            self._processes.request_stacks(child)
            lines.append(f"  {child.role.title}: Python stacks in {child.stdout}")
        seconds = now - self._stepped
        log.warning("No step finished for %s. Waits:\n%s", human_duration(seconds), "\n".join(lines))
        self._recorder.note("stall", seconds=round(seconds, 1), waits=texts)
