"""The run directory: who owns it, which attempt this is, and what a run leaves in it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from buckeye.errors import CheckpointError, UsageError
from buckeye.monitor.tracker import WANDB_FOLDER
from buckeye.process import RunIdentity
from buckeye.run.journal import EVENTS_FILE
from buckeye.run.record import STATUS_FILE
from buckeye.storage import is_locked, read_json, step_directories, write_file
from buckeye.transport.restarts import RESTART_FOLDER

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
LOG_FOLDER = "logs"
_OURS = (
    "batches",
    "checkpoints",
    "configs",
    EVENTS_FILE,
    "exports",
    LOG_FOLDER,
    "metrics.jsonl",
    "micro_batch.json",
    RESTART_FOLDER,
    "rollouts",
    RUN_FILE,
    "skipped",
    STATUS_FILE,
    "stop",
    WANDB_FOLDER,
    "weights",
)


def files_of_a_run(output_dir: Path) -> list[Path]:
    """What an earlier run left in `output_dir`; files of others are not listed, nor are those of `evals`,
    which writes next to the evaluations of a run."""
    evaluations = step_directories(output_dir / "evals").values()
    return [*(output_dir / name for name in _OURS if (output_dir / name).exists()), *evaluations]


def refuse_used(output_dir: Path, *, resume_command: str) -> None:
    """Raise UsageError if another run has written here, saying how to go on with it."""
    if files_of_a_run(output_dir):
        _refuse(output_dir, resume_command, "choose another --output-dir, or add --clean to delete that run")


def _refuse_trained(output_dir: Path, resume_command: str) -> None:
    """As `refuse_used`, for commands without --clean: what they left before the first step is no obstacle."""
    metrics = output_dir / "metrics.jsonl"
    trained = any((output_dir / name).exists() for name in ("checkpoints", STATUS_FILE, "weights"))
    if trained or (metrics.exists() and metrics.stat().st_size > 0):
        _refuse(output_dir, resume_command, "choose another --output-dir, or delete this one")


def _refuse(output_dir: Path, resume_command: str, afresh: str) -> NoReturn:
    raise UsageError(
        f"{output_dir} already holds a run. Nothing was touched. Either\n"
        f"  resume it:        {resume_command}\n"
        f"  or start afresh:  {afresh}"
    )


def clean(output_dir: Path, *, needed: Sequence[Path] = ()) -> list[Path]:
    """Delete what an earlier run left (only that), because the user asked for it with --clean.

    Raises UsageError, before anything is deleted, if no run was recorded there, or if one of the paths
    `needed` by the new run is among what would go.
    """
    removed = files_of_a_run(output_dir)
    if removed and not (output_dir / RUN_FILE).exists():
        raise UsageError(
            f"--clean: {output_dir} has {', '.join(p.name for p in removed)} but no {RUN_FILE}, so it is not "
            "certain that a run made them. Delete them yourself, or choose another --output-dir."
        )
    for path in needed:
        inside = [p for p in removed if path.resolve().is_relative_to(p.resolve())]
        if inside:
            raise UsageError(
                f"--clean would delete {path}, which this run starts from. Choose another --output-dir."
            )
    removed.sort(key=lambda path: path.name == RUN_FILE)  # last: without it, this would not be done again
    for path in removed:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return removed


def begin_attempt(output_dir: Path, *, resumed_step: int | None) -> RunIdentity:
    """Record that the run is started (again) and return its identity."""
    path = output_dir / RUN_FILE
    try:
        record = read_json(path)
        identity = RunIdentity(run_id=record["run_id"], attempt=int(record["attempt"]) + 1)
        attempts = list(record["attempts"])
    except FileNotFoundError:
        # whoever has it carried out elsewhere knows it by an id before it begins
        run_id = os.environ.get("BUCKEYE_NEW_RUN_ID") or secrets.token_hex(4)
        identity, attempts = RunIdentity(run_id=run_id, attempt=1), []
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Restore it, or start in a new directory."
        ) from None
    attempts.append({"attempt": identity.attempt, "started": time.time(), "resumed_step": resumed_step})
    record = {"run_id": identity.run_id, "attempt": identity.attempt, "attempts": attempts}
    write_file(path, json.dumps(record, indent=1))
    return identity


def attempt_logs(output_dir: Path, attempt: int) -> Path:
    """Where what the processes of an attempt print is."""
    return output_dir / LOG_FOLDER / f"attempt_{attempt}"


def log_path(output_dir: Path, name: str) -> Path:
    """The usual place of a log, which leads to the newest of its name."""
    return output_dir / LOG_FOLDER / name


def link_log(output_dir: Path, attempt: int, name: str) -> None:
    """Let the usual place lead to the log of an attempt, in one step. Where the file system has no links, the
    logs of the attempts are all there is."""
    link = log_path(output_dir, name)
    temporary = link.with_name(f".{name}.tmp-{os.getpid()}")
    try:
        if link.is_file() and not link.is_symlink():  # an earlier version of Buckeye has written it
            before = attempt_logs(output_dir, attempt - 1)
            before.mkdir(exist_ok=True)
            link.replace(before / name)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(Path(attempt_logs(output_dir, attempt).name, name))
        temporary.replace(link)
    except OSError as error:
        log.warning("%s does not lead to the newest log: %s", link, error)


def earlier_logs(output_dir: Path) -> list[Path]:
    """The folders of logs that no usual place leads to: of attempts that are over."""
    links = (output_dir / LOG_FOLDER).glob("*.stdout")
    in_use = {path.readlink().parts[0] for path in links if path.is_symlink()}
    return [p for p in sorted((output_dir / LOG_FOLDER).glob("attempt_*")) if p.name not in in_use]


@contextmanager
def claimed(output_dir: Path, *, resumed: bool, resume_command: str) -> Iterator[None]:
    """Hold the directory for a process that is a run by itself, and give it an identity of its own. Ranks
    other than the first leave that to the first."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    with locked(output_dir):
        if not resumed:
            _refuse_trained(output_dir, resume_command)
        identity = begin_attempt(output_dir, resumed_step=None)
        os.environ["BUCKEYE_RUN_ID"], os.environ["BUCKEYE_ATTEMPT"] = identity.run_id, str(identity.attempt)
        yield


def is_in_use(output_dir: Path) -> bool:
    """Whether a run holds the directory now. Writes nothing."""
    return is_locked(output_dir / ".lock")


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Hold the directory: a second `rl` on it ends with a message instead of mixing two runs."""
    output_dir.mkdir(parents=True, exist_ok=True)
    handle = os.open(output_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip()
            raise UsageError(
                f"{output_dir} is in use by a run that is going on (process {holder or 'unknown'}). "
                "Stop that one first, or choose another --output-dir."
            ) from None
        except OSError as error:
            log.warning(
                "The file system of %s has no locks (%s): see to it yourself that no other run writes there",
                output_dir,
                error.strerror,
            )
        with suppress(OSError):  # a full disk must not keep anybody from cleaning up
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)
