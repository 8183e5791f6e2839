"""`status.json`: the launcher's record of its run. Readers check it against the running processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import psutil

from buckeye.base.storage import write_file
from buckeye.errors import UsageError

T = TypeVar("T")

STATUS_FILE = "status.json"
DIRECTORY_ID_VARIABLE = "BUCKEYE_RUN_PLACE"
"""Environment variable with the `directory_id` of a process's run.

The run id is not enough: copies share it.
"""

RecordedState = Literal["starting", "running", "stopping", "finished", "failed", "stopped"]
RunState = Literal["starting", "running", "stopping", "paused", "finished", "failed", "stopped", "dead"]
"""Recorded state, or one of two states that are never recorded.

`paused`: the launcher is suspended. `dead`: the launcher ended without recording the end of the run.
"""

_KILLED = "the launcher ended without recording a reason: it was killed, or the machine was shut down"

ACTIVE_STATES: frozenset[RunState] = frozenset({"starting", "running", "stopping", "paused"})


def birth_time(pid: int) -> float:
    """Return the start time of a process. A later process with an equal pid has another start time.

    The time is in clock ticks since boot, which clock changes do not affect. Raise `psutil.NoSuchProcess` if
    the process does not exist.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return float(fields.split()[19])  # clock ticks since boot


class ProcessRecord(msgspec.Struct, kw_only=True, frozen=True):
    """Process of a run.

    `started` is in seconds since the epoch. `birth` is the `birth_time` of the process. `node` is the number
    of its node; 0 is the launcher's node. `log` is its file in `logs/`. `doing` is its activity since the
    time `since`, and `on` is the kind of process that it waits for. `restarts` counts the restarts of the
    process.
    """

    title: str
    pid: int
    node: int = 0
    started: float
    birth: float = 0.0
    port: int | None = None
    log: str | None = None
    ready: bool = False
    doing: str = "starts"
    on: str | None = None
    since: float | None = None
    restarts: int = 0

    def process(self) -> psutil.Process | None:
        """Return the process if it still runs on this host, else None."""
        if self.node:
            return None
        try:
            process = psutil.Process(self.pid)
            is_same = birth_time(self.pid) == self.birth
            return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


class RunRecord(msgspec.Struct, kw_only=True, frozen=True):
    """Content of `status.json`. Times are in seconds since the epoch.

    `arguments` are the arguments of `rl` in the newest attempt, which ran in `working_directory`.
    `start_step` is the step that the attempt started from. `place` is the `directory_id`, so that readers
    detect a copied directory.
    """

    run_id: str
    attempt: int
    state: RecordedState
    host: str
    launcher: ProcessRecord | None
    processes: tuple[ProcessRecord, ...] = ()
    arguments: tuple[str, ...]
    working_directory: str
    max_steps: int | None
    max_async_level: int
    start_step: int
    stop_seconds: float
    restarts: int = 0
    started: float
    ended: float | None = None
    reason: str | None = None
    place: str | None = None

    @property
    def elsewhere(self) -> bool:
        """True if the run was started on another machine. Then its processes cannot be inspected."""
        return self.host != socket.gethostname()

    def launcher_process(self) -> psutil.Process | None:
        """Return the process of `rl` if it still runs, else None."""
        return self.launcher.process() if self.launcher is not None and not self.elsewhere else None

    def actual_state(self) -> RunState:
        """Return the recorded state; `paused` if the launcher is suspended, `dead` if it has ended."""
        if self.state not in ACTIVE_STATES or self.elsewhere:
            return self.state
        launcher = self.launcher_process()
        if launcher is None:
            return "dead"
        return "paused" if launcher.status() == psutil.STATUS_STOPPED else self.state

    def actual_reason(self) -> str | None:
        """Return the reason for the end of the run, if known."""
        return _KILLED if self.actual_state() == "dead" else self.reason


@dataclass(frozen=True, slots=True)
class LeftProcess:
    """Running process of a run, with its title."""

    process: psutil.Process
    title: str


def write_struct(path: Path, value: Any) -> None:
    """Write a record as JSON, atomically."""
    write_file(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def read_struct(path: Path, kind: type[T], *, hint: str) -> T:
    """Return the record in a JSON file. Raise `FileNotFoundError`, or `UsageError` if it is invalid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"invalid record: {error}", code="BK-FILE-FORMAT", at=str(path), hint=hint) from None


def write_record(output_dir: Path, record: RunRecord) -> None:
    """Replace `status.json` atomically."""
    write_struct(output_dir / STATUS_FILE, record)


def directory_id(output_dir: Path) -> str:
    """Return an identifier of a directory that differs for copies: device, inode and path."""
    status = output_dir.stat()
    return f"{status.st_dev}:{status.st_ino} {output_dir.resolve()}"


def _is_same_directory(first: str, second: str) -> bool:
    """Return True if inode or path are equal. A rename changes the path. Some file systems change inodes."""
    return any(a == b for a, b in zip(first.split(" ", 1), second.split(" ", 1), strict=False))


def read_record(output_dir: Path) -> RunRecord:
    """Return the record of a run. In a copy of the directory, the record has no processes.

    Raise `UsageError` if the record is missing or cannot be read.
    """
    hint = "start or resume the run, which replaces this file"
    try:
        record = read_struct(output_dir / STATUS_FILE, RunRecord, hint=hint)
        current_id = directory_id(output_dir)
    except FileNotFoundError:
        raise UsageError(
            f"{output_dir} has no {STATUS_FILE}: no run was started there, or only by an earlier version",
            code="BK-RUN-NOT-FOUND",
            hint="pass the directory of a run; `buckeye rl list` lists them",
        ) from None
    if record.place is None or _is_same_directory(record.place, current_id):
        return record
    return msgspec.structs.replace(record, place=current_id, launcher=None, processes=())


def this_process(title: str) -> ProcessRecord:
    """Return the record of the current process."""
    started = psutil.Process().create_time()
    return ProcessRecord(title=title, pid=os.getpid(), started=started, birth=birth_time(os.getpid()))


def processes_left(record: RunRecord) -> list[LeftProcess]:
    """Return all running processes of a run.

    These are the recorded processes, and all processes with the run's id in their environment.
    """
    launcher = [record.launcher] if record.launcher is not None else []
    by_pid = {
        process.pid: LeftProcess(process, recorded.title)
        for recorded in [*launcher, *record.processes]
        if (process := recorded.process()) is not None
    }
    own_pids = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in _processes_of_run(record.run_id, record.place):
        if process.pid not in own_pids:
            by_pid.setdefault(process.pid, LeftProcess(process, f"process {process.pid} ({process.name()})"))
    return list(by_pid.values())


def _processes_of_run(run_id: str, place: str | None) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get("BUCKEYE_RUN_ID") != run_id:
                continue
            if place is None or environment.get(DIRECTORY_ID_VARIABLE, place) == place:
                yield process
        except psutil.Error:  # ended, or owned by another user
            continue
