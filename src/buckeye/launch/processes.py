"""Start, observe and end the processes of a plan."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.keys import child_environment
from buckeye.base.process import RunIdentity
from buckeye.base.storage import write_file
from buckeye.config.load import to_json
from buckeye.config.rl import RLConfig
from buckeye.config.shared import CheckpointConfig
from buckeye.config.trainer import TrainerCheckpointConfig
from buckeye.launch.heartbeats import HeartbeatReader
from buckeye.launch.hosts import Host, LocalProcess
from buckeye.launch.plan import Role, RolePlan
from buckeye.launch.remote_process import RemoteProcess
from buckeye.run_files.directory import attempt_logs, link_log, log_path
from buckeye.run_files.record import DIRECTORY_ID_VARIABLE, directory_id

log = logging.getLogger(__name__)

TERM_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class Child:
    """A started process of the plan.

    `kill_reason` is the reason why the launcher killed the process, or None. `memory` is the last measured
    memory use, in bytes.
    """

    role: Role
    process: LocalProcess | RemoteProcess
    stdout: Path
    heartbeats: HeartbeatReader
    kill_reason: str | None = None
    memory: int | None = None

    @property
    def running(self) -> bool:
        return self.returncode is None

    @property
    def returncode(self) -> int | None:
        """Exit code, or None while the process runs."""
        code = self.process.returncode
        self.kill_reason = self.kill_reason or self.process.lost
        return code

    @property
    def key(self) -> tuple[int, int]:
        """Key that is unique in the run: the number of the node, and the process id on that node."""
        return self.role.node, self.process.pid

    @property
    def is_local(self) -> bool:
        """True if the process runs on this host."""
        return self.role.node == 0


class Processes:
    """The child processes of a run.

    Each child has its own session, so Ctrl-C in the terminal reaches only the launcher. Each child ends when
    the launcher ends for any reason (`die_with_parent`). Children on the other `nodes` get the variables
    `shared_env` in addition to the variables of their node.
    """

    def __init__(
        self,
        output_dir: Path,
        env: Mapping[str, str],
        *,
        nodes: Mapping[int, Host] | None = None,
        shared_env: Mapping[str, str] | None = None,
    ) -> None:
        self._output_dir = output_dir
        self._nodes = {} if nodes is None else nodes
        self._shared_env = dict(shared_env or {})
        self._env = {**os.environ, **env, "BUCKEYE_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self._attempt: int | None = None
        self.children: list[Child] = []

    def set_attempt(self, identity: RunIdentity) -> None:
        """Assign all processes that are started after this call to the attempt `identity` of the run."""
        variables = {
            "BUCKEYE_RUN_ID": identity.run_id,
            "BUCKEYE_ATTEMPT": str(identity.attempt),
            DIRECTORY_ID_VARIABLE: directory_id(self._output_dir),
        }
        self._env |= variables
        self._shared_env |= variables
        self._attempt = identity.attempt

    def start(self, role: Role) -> Child:
        """Start one process.

        Its stdout and stderr are appended to `logs/attempt_N/<name>.stdout`, and `logs/<name>.stdout` is a
        link to this file. Without a call of `set_attempt`, `logs/<name>.stdout` is the file.
        """
        stdout = self._log_path(role)
        stdout.parent.mkdir(parents=True, exist_ok=True)
        process: LocalProcess | RemoteProcess
        if role.node:
            env = {**self._shared_env, **role.env}
            process = self._nodes[role.node].start(role, env, stdout)
        else:
            runs_rollouts = role.kind in ("gateway", "orchestrator")
            env = child_environment(self._env, runs_rollouts=runs_rollouts) | role.env
            with stdout.open("ab") as output:
                process = LocalProcess(role.argv, env=env, output=output)
        child = Child(role, process, stdout, HeartbeatReader.of(process.heartbeats))
        self.children.append(child)
        if self._attempt is not None:
            link_log(self._output_dir, self._attempt, stdout.name)
        return child

    def absent(self, roles: Iterable[Role]) -> list[str]:
        """Return the nodes of these roles that are absent, as names for messages."""
        numbers = sorted({role.node for role in roles if role.node})
        return [name for number in numbers if (name := self._nodes[number].absent) is not None]

    def _log_path(self, role: Role) -> Path:
        if self._attempt is None:
            return log_path(self._output_dir, role.stdout_name)
        return attempt_logs(self._output_dir, self._attempt) / role.stdout_name

    def of_kind(self, *kinds: str) -> list[Child]:
        """Return the children of the given kinds, in start order."""
        return [child for child in self.children if child.role.kind in kinds]

    def forget(self, child: Child) -> None:
        """Remove a child that has ended, and close its pipe."""
        child.heartbeats.close()
        self.children.remove(child)

    def request_stop(self, children: Sequence[Child]) -> None:
        """Request children to end: send SIGTERM to their sessions."""
        for child in children:
            child.process.signal(signal.SIGTERM, session=True)

    def stop(self, children: Sequence[Child], grace: float) -> None:
        """End children: send SIGTERM to their sessions, and SIGKILL after at most `grace` seconds.

        Returns when all children have ended.
        """
        self.request_stop(children)
        deadline = time.monotonic() + grace
        while any(child.running for child in children) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for child in children:
            if child.running:
                log.warning("Killing %s: it did not end within %.0f s of SIGTERM", child.role.title, grace)
            child.process.signal(signal.SIGKILL, session=True)
            child.process.wait()

    def kill(self, child: Child, reason: str) -> None:
        """Kill a child and its session immediately. Messages about the end of the child contain `reason`."""
        child.kill_reason = reason
        child.process.signal(signal.SIGKILL, session=True)

    def request_stacks(self, child: Child) -> None:
        """Request a child to write its Python stacks to its log, unless it has not sent a heartbeat yet."""
        if child.running and child.heartbeats.last_heartbeat is not None:
            child.process.signal(signal.SIGUSR1, session=False)

    def stop_all(self) -> None:
        """End every child that is still running."""
        self.stop(self.children, TERM_GRACE_SECONDS)


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` lines in the last 64 kB of a text file, or [] if the file does not exist."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        return file.read().decode(errors="replace").splitlines()[-count:]


def write_role_configs(
    config: RLConfig, plan: RolePlan, *, model_path: Path, step: int | None, is_own: bool = False
) -> None:
    """Write the resolved configuration of every process to `configs/`.

    An attempt begins at the checkpoint of `step`, or at the original model if `step` is None. `is_own` is
    True if an earlier attempt of this start wrote the checkpoint. Then the attempt ignores the `skip_`
    settings of `ckpt`, which are for checkpoints of earlier starts.
    """
    directory = config.output_dir / "configs"
    directory.mkdir(parents=True, exist_ok=True)
    for role in plan.roles:
        if role.config_name is None:
            continue
        section = getattr(config, role.kind)
        model = section.model.model_copy(update={"name": str(model_path)})
        changes: dict[str, object] = {"output_dir": config.output_dir.absolute(), "model": model}
        if role.kind == "inference":
            host = {"host": role.host} if role.node else {}
            changes["server"] = section.server.model_copy(update={"port": role.port, **host})
        else:  # the launcher chooses the step, so that orchestrator and trainer begin at the same step
            changes["ckpt"] = _checkpoint_settings(section.ckpt, role, step, is_own=is_own)
        if role.kind == "orchestrator" and plan.base_urls:
            changes["client"] = section.client.model_copy(
                update={"base_url": plan.base_urls, "api_key_var": "BUCKEYE_INFERENCE_KEY"}
            )
        text = to_json(section.model_copy(update=changes))
        write_file(directory / role.config_name, text, mode=0o600)  # settings may hold keys


def _checkpoint_settings(
    ckpt: CheckpointConfig | None, role: Role, step: int | None, *, is_own: bool
) -> CheckpointConfig | None:
    """Return the checkpoint settings of a process.

    If the user set no `ckpt`, a stopped run still writes a checkpoint. A resume then needs `resume_step`.
    """
    if ckpt is None:
        if step is None:
            return None
        kind = TrainerCheckpointConfig if role.kind == "trainer" else CheckpointConfig
        return kind(interval=None, resume_step=step)
    skips = [name for name in type(ckpt).model_fields if name.startswith("skip_")] if is_own else []
    return ckpt.model_copy(update={"resume_step": step, **dict.fromkeys(skips, False)})
