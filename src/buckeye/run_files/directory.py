"""Run directory: lock, attempts, stop requests, and the files that a run leaves."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from buckeye.base.process import RunIdentity, StopFlag
from buckeye.base.storage import (
    is_locked,
    lock_file,
    read_json,
    remove_directory,
    step_directories,
    write_file,
    write_link,
)
from buckeye.errors import CheckpointError, RunError, UsageError
from buckeye.monitor.metrics import TRAINER_PROCESSES, read_metrics
from buckeye.monitor.tracker_threads import TRACKER_FOLDERS
from buckeye.run_files.events import EVENTS_FILE
from buckeye.run_files.record import ACTIVE_STATES, STATUS_FILE, read_record
from buckeye.transport.restart_requests import RESTART_FOLDER
from buckeye.transport.weights_offer import BROADCAST_FOLDER

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
EARLIER_FOLDER = "earlier_starts"
REMOTE_FILE = "remote.json"
"""File that a run directory has if the run was last started on another machine."""
LOG_FOLDER = "logs"
STOP_FILE = "stop"
"""File that requests the launcher of the run to end it. The launcher may be on another machine."""
_POLL_SECONDS = 2.0
_RUN_CONTENT = (
    "batches",
    BROADCAST_FOLDER,
    "checkpoints",
    "configs",
    EVENTS_FILE,
    "exports",
    LOG_FOLDER,
    METRICS_FILE,
    "micro_batch.json",
    RESTART_FOLDER,
    "rollouts",
    RUN_FILE,
    "skipped",
    STATUS_FILE,
    STOP_FILE,
    "trained",
    *TRACKER_FOLDERS,
    "weights",
)


class DirectoryLostError(RunError):
    """The directory of an active run was deleted, moved, or has another run."""

    code = "BK-RUN-MISMATCH"


def files_of_a_run(output_dir: Path) -> list[Path]:
    """Return the files of an earlier run in `output_dir`.

    Third-party files and the results of the `evals` command are left out.
    """
    evaluations = step_directories(output_dir / "evals").values()
    return [*(path for name in _RUN_CONTENT if (path := output_dir / name).exists()), *evaluations]


def check_unused(output_dir: Path, *, resume_command: str, cleans: bool = True) -> None:
    """Raise `UsageError`, with the command to resume, if the directory has a run that may have trained.

    An unstarted run is allowed, because `move_unstarted_run` moves its files. `cleans` is True if the command
    has a --clean flag.
    """
    files = files_of_a_run(output_dir)
    if not files or is_unstarted(output_dir):
        return
    if not any((output_dir / name).exists() for name in (RUN_FILE, REMOTE_FILE, STATUS_FILE, "checkpoints")):
        raise UsageError(
            f"{_describe_third_party(output_dir, files)}, and a run would write there",
            code="BK-FILE-EXISTS",
            hint="choose another `--output-dir`",
        )
    alternative = "add `--clean` to delete that run" if cleans else "delete that run"
    raise UsageError(
        f"{output_dir} already has a run",
        code="BK-FILE-EXISTS",
        hint=f"resume it: {resume_command}\n"
        f"  or start a new run: choose another `--output-dir`, or {alternative}",
    )


def _describe_third_party(output_dir: Path, files: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in files)
    return f"{output_dir} has {names}, but no {RUN_FILE}: these files may not be those of a run"


def is_unstarted(output_dir: Path) -> bool:
    """Return True if the run in the directory never finished its first step.

    Return False if this is unknown, for example for an active run on another machine.
    """
    try:
        attempts = read_json(output_dir / RUN_FILE)["attempts"]
        resumed = any(attempt["resumed_step"] is not None for attempt in attempts)
        trained = any(
            record["process"] in TRAINER_PROCESSES for record in read_metrics(output_dir / METRICS_FILE)
        )
        checkpoints = list((output_dir / "checkpoints").glob("*"))
        is_remote = _is_active_elsewhere(output_dir)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    published = set(step_directories(output_dir / "weights")) - {0}
    return not (resumed or trained or checkpoints or published or is_remote)


def _is_active_elsewhere(output_dir: Path) -> bool:
    remote_file = output_dir / REMOTE_FILE
    if remote_file.exists() and read_json(remote_file)["state"] != "over":
        return True
    try:
        record = read_record(output_dir)
    except UsageError:  # an unreadable status file may be that of an active run
        return (output_dir / STATUS_FILE).exists()
    return record.elsewhere and record.state in ACTIVE_STATES


def move_unstarted_run(
    output_dir: Path, *, needed: Sequence[Path] = (), also: Sequence[Path] = ()
) -> Path | None:
    """Move the files of an unstarted run, and the files in `also`, to a new folder. Return this folder.

    Return None if the run may have started. Copies of the initial model are deleted. The caller holds the
    directory's lock. Raise `UsageError`, before anything is moved, if one of the paths `needed` by the new
    run would be moved.
    """
    if not is_unstarted(output_dir):
        return None
    _check_not_needed(files_of_a_run(output_dir), needed, "starting the run would move")
    run_id = read_json(output_dir / RUN_FILE)["run_id"]
    names = itertools.chain([run_id], (f"{run_id}-{number}" for number in itertools.count(2)))
    archive = next(folder for name in names if not (folder := output_dir / EARLIER_FOLDER / name).exists())
    archive.mkdir(parents=True)
    for copy in step_directories(output_dir / "weights").values():
        remove_directory(copy)
    remaining = [path for path in (*also, *files_of_a_run(output_dir)) if path.exists()]
    for path in sorted(remaining, key=lambda path: path.name == RUN_FILE):  # RUN_FILE last, for a retry
        target = archive / path.relative_to(output_dir)
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    return archive


def clean(output_dir: Path, *, needed: Sequence[Path] = ()) -> list[Path]:
    """Delete the files of an earlier run, and only these, for --clean.

    Raise `UsageError`, before anything is deleted, if no run was recorded there, or if one of the paths
    `needed` by the new run would be deleted.
    """
    removed = files_of_a_run(output_dir)
    if removed and not (output_dir / RUN_FILE).exists():
        raise UsageError(
            f"--clean: {_describe_third_party(output_dir, removed)}",
            code="BK-RUN-NOT-FOUND",
            hint="delete them yourself, or choose another `--output-dir`",
        )
    _check_not_needed(removed, needed, "--clean would delete")
    removed += [path for path in [output_dir / EARLIER_FOLDER] if path.exists()]
    removed.sort(key=lambda path: path.name == RUN_FILE)  # RUN_FILE last: a retry of --clean needs it
    for path in removed:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return removed


def _check_not_needed(removed: Sequence[Path], needed: Sequence[Path], action: str) -> None:
    for path in needed:
        if any(path.resolve().is_relative_to(folder.resolve()) for folder in removed):
            raise UsageError(
                f"{action} {path}, which the new run needs",
                code="BK-FILE-EXISTS",
                hint="choose another `--output-dir`",
            )


def begin_attempt(output_dir: Path, *, resumed_step: int | None) -> RunIdentity:
    """Record a new attempt of the run, and return its identity."""
    path = output_dir / RUN_FILE
    try:
        record = read_json(path)
        identity = RunIdentity(run_id=record["run_id"], attempt=int(record["attempt"]) + 1)
        attempts = list(record["attempts"])
    except FileNotFoundError:
        # a remote launcher chooses the id before the run starts
        run_id = os.environ.get("BUCKEYE_NEW_RUN_ID") or secrets.token_hex(4)
        identity, attempts = RunIdentity(run_id=run_id, attempt=1), []
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"invalid list of attempts: {error}",
            code="BK-FILE-FORMAT",
            at=str(path),
            hint="restore this file, or start in a new directory",
        ) from None
    attempts.append({"attempt": identity.attempt, "started": time.time(), "resumed_step": resumed_step})
    record = {"run_id": identity.run_id, "attempt": identity.attempt, "attempts": attempts}
    write_file(path, json.dumps(record, indent=1))
    return identity


def check_owner(output_dir: Path, run_id: str) -> None:
    """Raise `DirectoryLostError` if the directory is not that of the active run `run_id` any more."""
    try:
        owner = read_json(output_dir / RUN_FILE)["run_id"]
    except FileNotFoundError:
        owner = None
    except (OSError, ValueError, KeyError, TypeError):  # a file system may fail for a moment
        return
    if owner != run_id:
        raise DirectoryLostError(
            f"{output_dir} was deleted, moved or replaced while its run was active",
            hint="start again. To continue a run whose directory you moved: `buckeye rl resume DIRECTORY`",
        )


def attempt_logs(output_dir: Path, attempt: int) -> Path:
    """Return the log folder of an attempt."""
    return output_dir / LOG_FOLDER / f"attempt_{attempt}"


def log_path(output_dir: Path, name: str) -> Path:
    """Return the stable path of a log: a link to the newest log with this name."""
    return output_dir / LOG_FOLDER / name


def link_log(output_dir: Path, attempt: int, name: str) -> None:
    """Point the stable path to the log of an attempt, atomically.

    If the file system does not support links, only log a warning.
    """
    link = log_path(output_dir, name)
    try:
        write_link(link, f"{attempt_logs(output_dir, attempt).name}/{name}")
    except OSError as error:
        log.warning("Cannot link %s to the newest log: %s", link, error)


def earlier_logs(output_dir: Path) -> list[Path]:
    """Return the log folders of attempts that are over: no stable path points to them."""
    links = (output_dir / LOG_FOLDER).glob("*.stdout")
    in_use = {path.readlink().parts[0] for path in links if path.is_symlink()}
    folders = (p for p in sorted((output_dir / LOG_FOLDER).glob("attempt_*")) if p.name not in in_use)
    return [folder for folder in folders if folder.name.removeprefix("attempt_").isdecimal()]


@contextmanager
def claim_directory(output_dir: Path, *, resumed: bool, resume_command: str) -> Iterator[None]:
    """Lock the directory for a run without a launcher, and set its run identity.

    Other ranks than 0 do nothing.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    with lock_directory(output_dir):
        if not resumed:
            check_unused(output_dir, resume_command=resume_command, cleans=False)
            move_unstarted_run(output_dir)
        identity = begin_attempt(output_dir, resumed_step=None)
        os.environ["BUCKEYE_RUN_ID"], os.environ["BUCKEYE_ATTEMPT"] = identity.run_id, str(identity.attempt)
        yield


def is_in_use(output_dir: Path) -> bool:
    """Return True if a run holds the directory's lock."""
    return is_locked(output_dir / ".lock")


@contextmanager
def lock_directory(output_dir: Path) -> Iterator[None]:
    """Lock the directory during the block. Raise `UsageError` if another process holds the lock.

    If the block writes no files, for example because a start is refused, remove the lock file and the folders
    that were created for it.
    """
    created = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
    output_dir.mkdir(parents=True, exist_ok=True)
    before = set(os.listdir(output_dir))
    handle = _open_locked(output_dir)
    try:
        with suppress(OSError):  # a full disk must not prevent a cleanup
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            if set(os.listdir(output_dir)) == before | {".lock"} != before:
                (output_dir / ".lock").unlink()
                for folder in created:
                    folder.rmdir()
        os.close(handle)


def _open_locked(output_dir: Path) -> int:
    """Open and lock the lock file. Raise `UsageError` if another process holds the lock."""
    path = output_dir / ".lock"
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            lock_file(handle)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip()
            os.close(handle)
            raise UsageError(
                f"{output_dir} is in use by a running process ({holder or 'unknown'})",
                code="BK-RUN-ACTIVE",
                hint="stop that run first, or choose another `--output-dir`",
            ) from None
        except OSError as error:
            log.warning(
                "The file system of %s has no locks (%s): make sure that no other run writes there",
                output_dir,
                error.strerror,
            )
        with suppress(FileNotFoundError):  # a refused start has deleted the file
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)
        output_dir.mkdir(parents=True, exist_ok=True)


class StopRequests:
    """Stop requests for a run, by a signal or by STOP_FILE. A STOP_FILE from before the start is deleted."""

    def __init__(self, output_dir: Path, stop: StopFlag) -> None:
        self._path = output_dir / STOP_FILE
        self._stop = stop
        self._is_requested = False
        self._next_check = 0.0
        self._path.unlink(missing_ok=True)

    def requested(self) -> bool:
        """Return True if a stop was requested. The launcher calls this method repeatedly."""
        now = time.monotonic()
        if now >= self._next_check and not self._is_requested:
            self._next_check = now + _POLL_SECONDS
            self._is_requested = self._path.exists()
        return self._stop.requested or self._is_requested


def request_stop(output_dir: Path) -> None:
    """Request a stop from the launcher of a run, on any machine."""
    write_file(output_dir / STOP_FILE, "")


def withdraw_stop(output_dir: Path) -> None:
    """Withdraw a stop request that no launcher has handled."""
    (output_dir / STOP_FILE).unlink(missing_ok=True)
