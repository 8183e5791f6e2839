"""`status.json`: what the launcher says about its run. A reader checks it against the processes there are."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from buckeye.base.storage import write_file
from buckeye.errors import UsageError

STATUS_FILE = "status.json"
PLACE_VARIABLE = "BUCKEYE_RUN_PLACE"
"""The environment variable that tells the processes of a run from those of a copy of its directory."""

Recorded = Literal["starting", "running", "stopping", "finished", "failed", "stopped"]
State = Literal["starting", "running", "stopping", "paused", "finished", "failed", "stopped", "dead"]
"""What is recorded, and two states that only a reader can see: a launcher that is suspended, and one that is
gone without having said how the run ended."""

GOING_ON: frozenset[State] = frozenset({"starting", "running", "stopping", "paused"})


def birth_of(pid: int) -> float:
    """When a process started, on a clock that nobody sets (on Linux; elsewhere in seconds since the epoch):
    tells it from others with the same pid. Raises psutil.NoSuchProcess if there is none."""
    if sys.platform != "linux":
        return float(psutil.Process(pid).create_time())
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    return float(fields.split()[19])  # clock ticks since boot


class ProcessRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A process of a run, `started` at a time in seconds since the epoch; its `birth` tells it from a later
    one with the same pid, also when the clock is set. It is on `node` of the run, 0 for that of the launcher.
    `log` is its file in `logs/`. What it does is `doing`,
    since `since`; with `on` it waits for that kind of process. It was started again `restarts` times."""

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
        """The process, if it is still there, and on this host."""
        if self.node:
            return None
        try:
            process = psutil.Process(self.pid)
            same = birth_of(self.pid) == self.birth
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


_KILLED = "its launcher ended without a word: it was killed, or the machine went down"


class RunRecord(msgspec.Struct, kw_only=True, frozen=True):
    """The content of `status.json`. `arguments` are the words after `rl` that started the newest attempt, in
    `working_directory`; `start_step` is the step that it went on from; times are seconds since the epoch.
    `place` is the directory itself, whatever it is called: a copy of it is another one."""

    run_id: str
    attempt: int
    state: Recorded
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
        """Whether the run was started on another machine, whose processes cannot be looked at."""
        return self.host != socket.gethostname()

    def launcher_process(self) -> psutil.Process | None:
        """The process of `rl`, if it is still there."""
        return self.launcher.process() if self.launcher is not None and not self.elsewhere else None

    def actual_state(self) -> State:
        """The recorded state, unless the launcher is suspended or gone."""
        if self.state not in GOING_ON or self.elsewhere:
            return self.state
        launcher = self.launcher_process()
        if launcher is None:
            return "dead"
        return "paused" if launcher.status() == psutil.STATUS_STOPPED else self.state

    def actual_reason(self) -> str | None:
        """Why it ended, as far as that is known."""
        return _KILLED if self.actual_state() == "dead" else self.reason


@dataclass(frozen=True, slots=True)
class LeftProcess:
    """A process that belongs to a run, and what it is called."""

    process: psutil.Process
    title: str


def write_record(output_dir: Path, record: RunRecord) -> None:
    """Replace `status.json`, in one step."""
    write_file(output_dir / STATUS_FILE, msgspec.json.format(msgspec.json.encode(record), indent=1))


def place_of(output_dir: Path) -> str:
    """What tells a directory from its copies: its number in the file system, and its path."""
    found = output_dir.stat()
    return f"{found.st_dev}:{found.st_ino} {output_dir.resolve()}"


def _is_same_place(one: str, other: str) -> bool:
    """A directory that is renamed keeps its number; some file systems give it another one now and then."""
    return any(a == b for a, b in zip(one.split(" ", 1), other.split(" ", 1), strict=False))


def read_record(output_dir: Path) -> RunRecord:
    """The record of a run. In a copy of a run's directory it names no processes: they are the other's. Raises
    UsageError if there is none, or none that can be read."""
    path = output_dir / STATUS_FILE
    try:
        record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
        here = place_of(output_dir)
        if record.place is None or _is_same_place(record.place, here):
            return record
        return msgspec.structs.replace(record, place=here, launcher=None, processes=())
    except FileNotFoundError:
        raise UsageError(
            f"{output_dir} has no {STATUS_FILE}: `rl` has started no run there, or one of an earlier version"
        ) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error}); the next start of the run replaces it") from None


def this_process(title: str) -> ProcessRecord:
    """The record of the process that asks."""
    started = psutil.Process().create_time()
    return ProcessRecord(title=title, pid=os.getpid(), started=started, birth=birth_of(os.getpid()))


def processes_left(record: RunRecord) -> list[LeftProcess]:
    """Every process of a run that is still there: the recorded ones, and whatever carries the run's id in its
    environment (such as the workers of an engine)."""
    named = [record.launcher, *record.processes] if record.launcher is not None else record.processes
    found = {
        process.pid: LeftProcess(process, known.title)
        for known in named
        if known is not None and (process := known.process()) is not None
    }
    ourselves = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in _of_run(record.run_id, record.place):
        if process.pid not in ourselves:
            found.setdefault(process.pid, LeftProcess(process, f"process {process.pid} ({process.name()})"))
    return list(found.values())


def _of_run(run_id: str, place: str | None) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get("BUCKEYE_RUN_ID") != run_id:
                continue
            if place is None or environment.get(PLACE_VARIABLE, place) == place:
                yield process
        except psutil.Error:  # gone, or another user's
            continue
