"""Record the state of a run in `status.json`, and its history in `events.jsonl`."""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import psutil

from buckeye.base.distribution import code_digest, versions
from buckeye.base.process import RunIdentity, usable_cores
from buckeye.base.storage import step_directories
from buckeye.config.rl import RLConfig
from buckeye.launch.changed_settings import record_config
from buckeye.launch.processes import Child, Processes
from buckeye.run_files.events import EventKind, write_event
from buckeye.run_files.record import (
    ProcessRecord,
    RecordedState,
    RunRecord,
    birth_time,
    directory_id,
    this_process,
    write_record,
)

log = logging.getLogger(__name__)

_SAVE_SECONDS = 2.0  # interval between checks for changes of the processes
_ALIVE_SECONDS = 10.0  # maximum age of `status.json`: its time shows readers that the launcher is alive


class Recorder:
    """Recorder of the processes of a run, and of new weights and checkpoints in its directory.

    A write error does not end the run: the first one is logged as a warning. On a resume, the command and the
    configuration are recorded when all processes are ready, or when the user stops the run before that. So if
    a trainer rejects the new settings, the settings of the earlier start remain recorded. `earlier` is the
    record of an earlier start.
    """

    def __init__(
        self,
        config: RLConfig,
        identity: RunIdentity,
        arguments: Sequence[str],
        resume_step: int | None,
        *,
        earlier: RunRecord | None,
    ) -> None:
        self._output_dir = config.output_dir
        self._config: RLConfig | None = config
        self._command = {"arguments": tuple(arguments), "working_directory": os.getcwd()}
        self.record = RunRecord(
            run_id=identity.run_id,
            attempt=identity.attempt,
            state="starting",
            host=socket.gethostname(),
            launcher=this_process("rl"),
            arguments=tuple(arguments) if earlier is None else earlier.arguments,
            working_directory=os.getcwd() if earlier is None else earlier.working_directory,
            max_steps=config.trainer.max_steps,
            max_async_level=config.orchestrator.max_async_level,
            start_step=resume_step or 0,
            stop_seconds=config.stop_seconds,
            started=time.time(),
            place=directory_id(config.output_dir),
        )
        self._processes: dict[tuple[int, int], ProcessRecord] = {}
        self._seen = {"weights": self._versions("weights"), "checkpoints": self._versions("checkpoints")}
        self._restarts: Counter[str] = Counter()
        self._next_save = self._alive_until = 0.0
        self._has_failed = False
        self._save()
        self.note(
            "start",
            directory=str(config.output_dir.absolute()),
            resumed_step=resume_step,
            versions={"code": code_digest(), **versions()},
            machine={"system": platform.platform(), "cores": usable_cores()},
        )

    def observe(self, processes: Processes) -> None:
        """Record the changes since the last call. The supervisor calls this method in each tick."""
        changed = self._observe_children(processes.children)
        self._observe_files()
        is_complete = bool(processes.of_kind("trainer"))  # before a restart the servers are alone
        ready = is_complete and all(record.ready for record in self._processes.values())
        if ready and self.record.state == "starting":
            self.note("ready", process="all")
            self._record_config()
            self._update(state="running")
        elif changed or time.monotonic() >= self._next_save:
            self._update()

    def record_attempt(self, identity: RunIdentity, resumed_step: int | None) -> None:
        """Record that the launcher begins a new attempt: it restarts the trainer and the orchestrator."""
        self.record = msgspec.structs.replace(self.record, attempt=identity.attempt)
        self.note("attempt", resumed_step=resumed_step)
        self._update(state="starting", start_step=resumed_step or 0, started=time.time())

    def record_restart(self, title: str, cause: str) -> None:
        """Record that a process has ended and will be restarted."""
        self.note("restart", process=title, cause=cause)
        self._restarts[title] += 1
        self._update(restarts=self.record.restarts + 1)

    def record_stop_request(self) -> None:
        """Record that the user has requested a stop of the run, and the settings of the next resume."""
        self.note("stopping")
        self._record_config()
        self._update(state="stopping")

    def record_end(self, state: RecordedState, reason: str | None = None) -> None:
        """Record that the run has ended, with its final state and the reason."""
        self._observe_files()
        kinds: dict[RecordedState, EventKind] = {"finished": "finish", "failed": "failure", "stopped": "stop"}
        self.note(kinds[state], **({"cause": reason} if reason else {}))
        self._update(state=state, reason=reason, ended=time.time(), processes=())

    def _record_config(self) -> None:
        """Record the command and the configuration of this start for the next resume."""
        if self._config is None:
            return
        try:
            record_config(self._config, since=self.record.start_step)
        except OSError as error:
            self._warn_once(error)
            return
        self._config = None
        self._update(**self._command)

    def _observe_children(self, children: Sequence[Child]) -> bool:
        """Update the records of the processes.

        Returns True if a process started, ended or became ready.
        """
        previous, self._processes = self._processes, {}
        for child in children:
            record = previous.get(child.key) or self._first_record(child)
            if record is not None:
                self._processes[child.key] = self._updated_record(child, record)
        was_ready = {key: record.ready for key, record in previous.items()}
        return was_ready != {key: record.ready for key, record in self._processes.items()}

    def _first_record(self, child: Child) -> ProcessRecord | None:
        """Return the first record of a child, or None if it has ended already."""
        try:
            started, birth = _start_times(child)
        except psutil.NoSuchProcess:
            return None
        role = child.role
        self.note("process", process=role.title, pid=child.process.pid, port=role.port)
        return ProcessRecord(
            title=role.title,
            pid=child.process.pid,
            node=role.node,
            started=started,
            birth=birth,
            port=role.port,
            log=child.stdout.name,
        )

    def _updated_record(self, child: Child, record: ProcessRecord) -> ProcessRecord:
        newest = child.heartbeats.newest
        if newest is None:
            return record
        if newest.ready and not record.ready:
            self.note("ready", process=record.title)
        since = record.since
        if since is None or (newest.doing, newest.on) != (record.doing, record.on):
            since = round(time.time() - (time.monotonic() - newest.since), 3)
        return msgspec.structs.replace(
            record,
            ready=newest.ready,
            doing=newest.doing,
            on=newest.on,
            since=since,
            restarts=self._restarts[record.title],
        )

    def _observe_files(self) -> None:
        """Record new weights and checkpoints.

        A repeated step replaces its directory. The inode then differs from the recorded inode.
        """
        for folder, previous in self._seen.items():
            current = self._versions(folder)
            for step, inode in current.items():
                if previous.get(step) != inode:
                    self.note("weights" if folder == "weights" else "checkpoint", step=step)
            self._seen[folder] = current

    def _versions(self, folder: str) -> dict[int, int]:
        """Return the inode of each directory `step_N` in a folder of the run, by step."""
        inodes = {}
        for step, path in step_directories(self._output_dir / folder).items():
            try:
                inodes[step] = path.stat().st_ino
            except FileNotFoundError:  # the trainer has just deleted the directory
                continue
        return inodes

    def _update(self, **changes: object) -> None:
        changes = {"processes": tuple(self._processes.values()), **changes}
        record = msgspec.structs.replace(self.record, **changes)
        if record != self.record or time.monotonic() >= self._alive_until:
            self.record = record
            self._save()

    def _save(self) -> None:
        self._next_save = time.monotonic() + _SAVE_SECONDS
        self._alive_until = time.monotonic() + _ALIVE_SECONDS
        try:
            write_record(self._output_dir, self.record)
        except OSError as error:
            self._warn_once(error)

    def note(self, event: EventKind, **details: object) -> None:
        """Append one event to `events.jsonl`."""
        try:
            write_event(self._output_dir, event, attempt=self.record.attempt, **details)
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._has_failed:
            log.warning("Cannot record the state of the run; `buckeye rl status` may be wrong: %s", error)
        self._has_failed = True


def _start_times(child: Child) -> tuple[float, float]:
    """Return the start time of a child in seconds since the epoch, and its `birth_time`.

    A later process can get the same pid, but has another `birth_time`. For a child on another node, return
    the current time and 0. Raises psutil.NoSuchProcess if the child has ended.
    """
    pid = child.process.pid
    if not child.is_local:
        return time.time(), 0.0
    return psutil.Process(pid).create_time(), birth_time(pid)
