"""The launcher's own notes on its run: `status.json` as it is, `events.jsonl` as it comes to be."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence

import httpx
import msgspec
import psutil

from buckeye.config.rl import RLConfig
from buckeye.process import RunIdentity
from buckeye.run.journal import EventKind, write_event
from buckeye.run.processes import Child, Processes
from buckeye.run.record import ProcessRecord, Recorded, RunRecord, this_process, write_record
from buckeye.storage import step_directories

log = logging.getLogger(__name__)

_HEALTH_SECONDS = 1.0
_HEALTH_TIMEOUT_SECONDS = 0.5


class Recorder:
    """Watches the processes and the directory of a run. It never ends a run: what cannot be written is a
    warning, once."""

    def __init__(
        self, config: RLConfig, identity: RunIdentity, arguments: Sequence[str], resume_step: int | None
    ) -> None:
        self._output_dir = config.output_dir
        self._record = RunRecord(
            run_id=identity.run_id,
            attempt=identity.attempt,
            state="starting",
            host=socket.gethostname(),
            launcher=this_process("rl"),
            arguments=tuple(arguments),
            working_directory=os.getcwd(),
            max_steps=config.trainer.max_steps,
            max_async_level=config.orchestrator.max_async_level,
            start_step=resume_step or 0,
            stop_seconds=config.trainer.dist_timeout_seconds,
            started=time.time(),
        )
        self._processes: dict[int, ProcessRecord] = {}
        self._seen = {"weights": self._versions("weights"), "checkpoints": self._versions("checkpoints")}
        self._published = False
        self._next_health = 0.0
        self._broken = False
        self._save()
        self._event("start", directory=str(config.output_dir.absolute()), resumed_step=resume_step)

    def observe(self, processes: Processes) -> None:
        """Note what has changed since the last call; to be called again and again."""
        changed = self._observe_children(processes.children)
        self._observe_files()
        changed = self._observe_readiness() or changed
        ready = bool(self._processes) and all(known.ready for known in self._processes.values())
        if ready and self._record.state == "starting":
            self._event("ready", process="all")
            self._update(state="running")
        elif changed:
            self._update()

    def restarting(self, title: str, cause: str) -> None:
        """A process has ended and will be started again."""
        self._event("restart", process=title, cause=cause)
        self._update(restarts=self._record.restarts + 1)

    def stopping(self) -> None:
        """Somebody has asked the run to stop."""
        self._event("stopping")
        self._update(state="stopping")

    def ended(self, state: Recorded, reason: str | None = None) -> None:
        """The run is over, and this is how."""
        self._observe_files()
        kinds: dict[Recorded, EventKind] = {"finished": "finish", "failed": "failure", "stopped": "stop"}
        self._event(kinds[state], **({"cause": reason} if reason else {}))
        self._update(state=state, reason=reason, ended=time.time(), processes=())

    def _observe_children(self, children: Sequence[Child]) -> bool:
        pids = {child.process.pid for child in children}
        new = [child for child in children if child.process.pid not in self._processes]
        gone = [pid for pid in self._processes if pid not in pids]
        for pid in gone:
            del self._processes[pid]
        for child in new:
            known = _record_of(child)
            if known is not None:
                self._processes[known.pid] = known
                self._event("process", process=known.title, pid=known.pid, port=known.port)
        return bool(new or gone)

    def _observe_files(self) -> None:
        """A directory with a new inode is a new version, also under a step that there was before."""
        for folder, seen in self._seen.items():
            now = self._versions(folder)
            for step, inode in now.items():
                if seen.get(step) != inode:
                    self._event("weights" if folder == "weights" else "checkpoint", step=step)
                    self._published = self._published or folder == "weights"
            self._seen[folder] = now

    def _observe_readiness(self) -> bool:
        """A server is ready when it answers (it is asked once a second until it does), a trainer when weights
        are published, and the orchestrator when all others are, since then it can play."""
        waiting = [known for known in self._processes.values() if not known.ready]
        servers = [known for known in waiting if known.port is not None]
        trainers = [known for known in waiting if known.title.startswith("trainer")]
        ready = trainers if self._published else []
        if servers and time.monotonic() >= self._next_health:
            self._next_health = time.monotonic() + _HEALTH_SECONDS
            ready = [*ready, *(known for known in servers if _answers(known))]
        if len(ready) == len(servers) + len(trainers):
            ready = waiting
        for known in ready:
            self._processes[known.pid] = msgspec.structs.replace(known, ready=True)
            self._event("ready", process=known.title)
        return bool(ready)

    def _versions(self, folder: str) -> dict[int, int]:
        """Step -> inode of every `step_N` in a folder of the run."""
        found = {}
        for step, path in step_directories(self._output_dir / folder).items():
            try:
                found[step] = path.stat().st_ino
            except FileNotFoundError:  # removed in the meantime
                continue
        return found

    def _update(self, **changes: object) -> None:
        changes = {"processes": tuple(self._processes.values()), **changes}
        self._record = msgspec.structs.replace(self._record, **changes)
        self._save()

    def _save(self) -> None:
        try:
            write_record(self._output_dir, self._record)
        except OSError as error:
            self._cannot_write(error)

    def _event(self, event: EventKind, **details: object) -> None:
        try:
            write_event(self._output_dir, event, attempt=self._record.attempt, **details)
        except OSError as error:
            self._cannot_write(error)

    def _cannot_write(self, error: OSError) -> None:
        if not self._broken:
            log.warning(
                "The state of the run cannot be recorded, so `buckeye rl status` may be wrong: %s", error
            )
        self._broken = True


def _answers(known: ProcessRecord) -> bool:
    try:
        url = f"http://127.0.0.1:{known.port}/health"
        return httpx.get(url, timeout=_HEALTH_TIMEOUT_SECONDS, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _record_of(child: Child) -> ProcessRecord | None:
    """None for a child that has ended already."""
    try:
        started = psutil.Process(child.process.pid).create_time()
    except psutil.NoSuchProcess:
        return None
    role = child.role
    return ProcessRecord(
        title=role.title, pid=child.process.pid, started=started, port=role.port, log=child.stdout.name
    )
