"""The attempts of a run. In an attempt, a trainer and an orchestrator run until the run or one of them ends.

If one of these processes dies, the launcher ends the attempt, and begins the next attempt at the newest
checkpoint.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from buckeye.base.process import RunIdentity
from buckeye.config.rl import RLConfig
from buckeye.errors import CheckpointError, RunError
from buckeye.launch.hosts import OtherNodes
from buckeye.launch.plan import RolePlan
from buckeye.launch.processes import Child, Processes, write_role_configs
from buckeye.launch.recorder import Recorder
from buckeye.launch.restarts import NODE_RETRY_SECONDS, FailureHandler
from buckeye.launch.resume import find_newest_commit
from buckeye.run_files.directory import attempt_logs, begin_attempt
from buckeye.run_files.logs import prune_logs

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLaunch:
    """Values that do not change between the attempts of one start of a run.

    The start began at the checkpoint of `step` (None: at the original model), with attempt `first_attempt`.
    `nodes` are the other hosts.
    """

    config: RLConfig
    model_path: Path
    first_attempt: RunIdentity
    step: int | None
    nodes: OtherNodes


class Attempts:
    """Supervises trainer and orchestrator, and restarts both together."""

    def __init__(self, launch: RunLaunch, plan: RolePlan, processes: Processes, recorder: Recorder) -> None:
        self.plan = plan
        self._launch = launch
        self._processes = processes
        self._recorder = recorder
        config = launch.config
        self._stop_timeout = float(config.stop_seconds)  # time to write a last checkpoint
        self._failures = FailureHandler(config.supervision, config.output_dir, recorder.record_restart)
        self._budget = self._failures.new_budget()
        self._state: Literal["running", "ending", "waiting"] = "running"
        self._deadline = 0.0  # ending: time to kill the processes; waiting: time to begin the next attempt
        self._delay = 0.0
        self._absent_since: float | None = None
        self._verifies_checkpoints = False  # True once a checkpoint was damaged

    @property
    def running(self) -> bool:
        """True while an attempt runs; False while it ends and until the next attempt has begun."""
        return self._state == "running"

    @property
    def members(self) -> list[Child]:
        """The processes of the attempt."""
        return self._processes.of_kind("orchestrator", "trainer")

    def tick(self, now: float, step: int) -> None:
        """Check the attempt and restart it if a process failed; call it repeatedly.

        `step` is the number of finished steps. Raises RunError, with the last lines of the failed process,
        if a restart is not possible or not allowed.
        """
        if self._state == "running":
            failed = [child for child in self.members if child.returncode not in (None, 0)]
            if failed:
                # if ranks end together, the rank that a signal killed (the lowest code) is the cause
                self._handle_failure(min(failed, key=lambda child: child.returncode or 0), now, step)
        elif self._state == "ending":
            self._end(now)
        elif now >= self._deadline:
            self._begin(now)

    def refill(self) -> None:
        """Reset the count of used restarts, because the run has made progress."""
        self._budget.refill()

    def _handle_failure(self, child: Child, now: float, step: int) -> None:
        delay = self._failures.restart_delay(
            child, self._budget, now, step=step, restarted="trainer and orchestrator"
        )
        failure = child.heartbeats.failure
        if failure is not None and failure.error == CheckpointError.__name__:
            self._verifies_checkpoints = True
        self._end_members(now, delay=delay)

    def _end_members(self, now: float, *, delay: float) -> None:
        """End the processes of the attempt that are still running.

        If all trainer ranks are alive, they finish their step and commit it. All other processes are killed:
        without all ranks no step can be finished, and an orchestrator has no state to save.
        """
        trainers = self._processes.of_kind("trainer")
        are_all_alive = all(child.running for child in trainers)
        if are_all_alive:
            self._processes.request_stop(trainers)
        for child in self.members:
            if child.running and not (are_all_alive and child in trainers):
                self._processes.kill(child, "belonged to an attempt that has ended")
        self._state, self._delay = "ending", delay
        self._deadline = now + (self._stop_timeout if are_all_alive else 0.0)

    def _end(self, now: float) -> None:
        running = [child for child in self.members if child.running]
        if running:
            for child in running if now > self._deadline else ():
                self._processes.kill(child, f"did not end within {self._stop_timeout:.0f} s of SIGTERM")
            return
        for child in self.members:
            self._processes.forget(child)
        self._state, self._deadline = "waiting", now + self._delay

    def _wait_for_nodes(self, now: float) -> bool:
        """Return True if a node is absent. Raises RunError if one is absent for `cluster.join_timeout`."""
        absent = self._processes.absent(self.plan.of_kind("orchestrator") + self.plan.of_kind("trainer"))
        if not absent:
            self._absent_since = None
            return False
        timeout, names = self._launch.config.cluster.join_timeout, ", ".join(absent)
        if self._absent_since is None:
            self._absent_since = now
            log.warning("Waiting at most %.0f s for the return of %s", timeout, names)
        if now - self._absent_since > timeout:
            raise RunError(
                f"cannot restart the run: {names} did not return within {timeout:.0f} s",
                code="BK-CLUSTER",
                hint="restart the node and resume the run, or raise `cluster.join_timeout`",
            )
        self._deadline = now + NODE_RETRY_SECONDS
        return True

    def _begin(self, now: float) -> None:
        if self._wait_for_nodes(now):
            return
        identity, step = self._prepare_attempt()
        self._processes.set_attempt(identity)
        self._recorder.record_attempt(identity, step)
        for kind in ("orchestrator", "trainer"):
            for role in self.plan.of_kind(kind):
                self._processes.start(role)
        self._state = "running"

    def _prepare_attempt(self) -> tuple[RunIdentity, int | None]:
        """Write the configs of the next attempt; return its identity and the step where it begins."""
        launch, first_attempt = self._launch, self._launch.first_attempt.attempt
        info = find_newest_commit(
            launch.config.output_dir, first_attempt=first_attempt, verify=self._verifies_checkpoints
        )
        is_own = info is not None
        step = launch.step if info is None else info.step
        write_role_configs(launch.config, self.plan, model_path=launch.model_path, step=step, is_own=is_own)
        identity = begin_attempt(launch.config.output_dir, resumed_step=step)
        prune_logs(launch.config.output_dir, launch.config.disk.keep_logs)
        if step is None:
            log.warning("The run has no checkpoint yet: attempt %d starts from step 0", identity.attempt)
        else:
            log.info("Attempt %d resumes from the checkpoint of step %d", identity.attempt, step)
        logs = attempt_logs(launch.config.output_dir, identity.attempt)
        logs.mkdir(parents=True, exist_ok=True)
        for role in self.plan.of_kind("orchestrator") + self.plan.of_kind("trainer"):
            (logs / role.stdout_name).touch()
        return identity, step
