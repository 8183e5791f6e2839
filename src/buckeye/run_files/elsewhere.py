"""`remote.json`: what is known here of a run on another machine, from its first second on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from buckeye.base.storage import write_file
from buckeye.errors import UsageError
from buckeye.run_files.directory import REMOTE_FILE, is_in_use
from buckeye.run_files.record import GOING_ON, Recorded, RunRecord, read_record


class JobThere(msgspec.Struct, kw_only=True, frozen=True):
    """The job of a run on a machine, and the way to it. `pod` is the machine's name if it was rented; `sent`
    are files of the run directory that came from here and are not fetched."""

    id: str
    pod: str | None
    target: str
    folder: str
    python: str
    identity_file: str | None
    known_hosts: str
    tmux: str
    sent: tuple[str, ...]


class Elsewhere(msgspec.Struct, kw_only=True, frozen=True):
    """A start of the run `run_id` on another machine. Times are in seconds since the epoch.

    It is `starting` until there is a job, then `running`, and `over` when all that is to be done here is
    done. `doing` is what was told last, at `said`; `stopping` that it was asked to end. `arguments` are the
    words after `rl` that the run was sent with, from `working_directory` here.
    """

    run_id: str
    state: Literal["starting", "running", "over"]
    started: float
    said: float
    doing: str = ""
    stopping: bool = False
    job: JobThere | None = None
    arguments: tuple[str, ...] = ()
    working_directory: str = ""


def write_elsewhere(output_dir: Path, away: Elsewhere) -> None:
    """Replace `remote.json`, in one step."""
    write_file(output_dir / REMOTE_FILE, msgspec.json.format(msgspec.json.encode(away), indent=1) + b"\n")


def read_elsewhere(output_dir: Path) -> Elsewhere | None:
    """What is known of a run elsewhere; None for one that is here. Raises UsageError if it cannot be read."""
    path = output_dir / REMOTE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Elsewhere)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error})") from None


def record_now(output_dir: Path) -> RunRecord:
    """The record of a run, also of one that has none here: it is being started elsewhere, or could not be.
    Raises UsageError if nothing is known of it."""
    away = read_elsewhere(output_dir)
    if away is None:
        return read_record(output_dir)
    try:
        record = read_record(output_dir)
    except UsageError:
        record = None
    lost = away.state == "starting" and not is_in_use(output_dir)
    state: Recorded = "failed" if lost or away.state == "over" else "starting"
    untold = record is not None and record.state in GOING_ON and away.state == "over"
    told_there = away.job is not None and not untold
    came_to_nothing = away.job is None and state == "failed"  # and the run is as it was before
    if record is not None and (told_there or came_to_nothing):
        return record
    reason = f"who started it was killed after: {away.doing}" if lost else away.doing
    known = record or RunRecord(
        run_id=away.run_id,
        attempt=0,
        state=state,
        host="",
        launcher=None,
        arguments=(),
        working_directory="",
        max_steps=None,
        max_async_level=0,
        start_step=0,
        stop_seconds=0.0,
        started=away.started,
    )
    return msgspec.structs.replace(
        known,
        state=state,
        host=away.job.target if away.job is not None else "another machine",
        launcher=None,
        processes=(),
        started=away.started,
        ended=away.said if state == "failed" else None,
        reason=reason,
    )


def is_remote(output_dir: Path) -> bool:
    """Whether the run here was last carried out elsewhere."""
    return (output_dir / REMOTE_FILE).exists()
