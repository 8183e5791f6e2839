"""Runs that this user has started: a small file per run with its directory.

Runs on another machine also have `remote.json`, with the local knowledge of them from their first second on.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from buckeye.base.storage import read_json, write_file
from buckeye.errors import UsageError
from buckeye.run_files.directory import REMOTE_FILE, RUN_FILE, is_in_use
from buckeye.run_files.record import ACTIVE_STATES, RecordedState, RunRecord, read_record

log = logging.getLogger(__name__)


class RemoteJob(msgspec.Struct, kw_only=True, frozen=True):
    """Job of a run on a remote machine, and its connection data.

    `pod` is the machine's name if it was rented. `sent` lists the files of the run directory that were
    uploaded from here and are not downloaded.
    """

    id: str
    pod: str | None
    target: str
    folder: str
    python: str
    identity_file: str | None
    known_hosts: str
    tmux: str
    sent: tuple[str, ...]


class RemoteRun(msgspec.Struct, kw_only=True, frozen=True):
    """Start of the run `run_id` on another machine. Times are in seconds since the epoch.

    `state` is `starting` until a job exists, then `running`, and `over` when all local work is done. `doing`
    is the last report, made at `said`. `stopping` is True if a stop was requested. `arguments` are the
    arguments after `rl` of the remote run, and `working_directory` is the local one.
    """

    run_id: str
    state: Literal["starting", "running", "over"]
    started: float
    said: float
    doing: str = ""
    stopping: bool = False
    job: RemoteJob | None = None
    arguments: tuple[str, ...] = ()
    working_directory: str = ""


def write_remote_run(output_dir: Path, away: RemoteRun) -> None:
    """Replace `remote.json` atomically."""
    write_file(output_dir / REMOTE_FILE, msgspec.json.format(msgspec.json.encode(away), indent=1) + b"\n")


def read_remote_run(output_dir: Path) -> RemoteRun | None:
    """Return the data of a remote run; None for a local run. Raise `UsageError` if it cannot be read."""
    path = output_dir / REMOTE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RemoteRun)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error})") from None


def current_record(output_dir: Path) -> RunRecord:
    """Return the record of a run, also of a remote run that has no local record yet, or failed to start.

    Raise `UsageError` if the directory has no data of a run.
    """
    away = read_remote_run(output_dir)
    if away is None:
        return read_record(output_dir)
    try:
        record = read_record(output_dir)
    except UsageError:
        record = None
    lost = away.state == "starting" and not is_in_use(output_dir)
    state: RecordedState = "failed" if lost or away.state == "over" else "starting"
    untold = record is not None and record.state in ACTIVE_STATES and away.state == "over"
    told_there = away.job is not None and not untold
    came_to_nothing = away.job is None and state == "failed"  # the previous record stays valid
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
    """Return True if the run's last start was on another machine."""
    return (output_dir / REMOTE_FILE).exists()


_SHORTEST_ID = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownRun:
    """Run and its directory. `registered` is the time of its first start, or of its fork."""

    run_id: str
    directory: Path
    registered: float

    @property
    def name(self) -> str:
        """Name of the run: the last part of its directory."""
        return self.directory.name


def register_run(output_dir: Path, run_id: str) -> None:
    """Register a run. A failure is only a warning, as the run does not depend on it."""
    path = _folder() / f"{run_id}.json"
    directory = str(output_dir.absolute())
    entry = {"run_id": run_id, "directory": directory, "registered": time.time()}
    try:
        known = read_json(path).get("directory") if path.exists() else None
        if known is not None and known != directory and _run_id(Path(known)) == run_id:
            path = path.with_stem(f"{run_id}-{zlib.crc32(os.fsencode(directory)):08x}")  # a copied run
            known = directory if path.exists() else None
        if known == directory:
            return
        write_file(path, json.dumps(entry))
    except (OSError, ValueError, AttributeError) as error:
        log.warning("`buckeye rl list` will not show this run: %s cannot be written (%s)", path, error)


def known_runs() -> tuple[list[KnownRun], int]:
    """Return the runs with existing directories, newest first, and the number of deleted ones."""
    found, gone = [], 0
    for path in _folder().glob("*.json"):
        try:
            run = _entry(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read (%s) and is passed over", path, error)
            continue
        if _run_id(run.directory) == run.run_id:
            found.append(run)
        else:
            gone += 1
    return sorted(found, key=lambda run: run.registered, reverse=True), gone


def find_run(word: str | None) -> Path:
    """Return the directory of the run that `word` names: a directory, a run's name, or a prefix of its id.

    Without a word, it is the run in ./outputs, else the newest known run. Raise `UsageError` if no run, or
    more than one, matches.
    """
    if word is None:
        return _default_run()
    directory = Path(word)
    if _run_id(directory) is not None:
        return directory
    runs, _ = known_runs()
    matches = [r for r in runs if r.name == word or (len(word) >= _SHORTEST_ID and r.run_id.startswith(word))]
    if len(matches) == 1:
        return matches[0].directory
    if matches:
        choices = "\n".join(f"  {run.run_id}  {run.directory}" for run in matches)
        raise UsageError(
            f"{word} is the name of {len(matches)} runs. Give the id or the directory:\n{choices}"
        )
    what = (
        "is a directory without a run" if directory.is_dir() else "is no directory, name or id of a known run"
    )
    raise UsageError(f"{word} {what}. `buckeye rl list` shows those that are known.")


def _default_run() -> Path:
    here = Path("outputs")
    if _run_id(here) is not None:
        return here
    runs, _ = known_runs()
    if not runs:
        raise UsageError("No run is known. Name the output directory of one.")
    return runs[0].directory


def _folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "buckeye" / "runs"


def _entry(path: Path) -> KnownRun:
    entry = read_json(path)
    return KnownRun(
        run_id=str(entry["run_id"]),
        directory=Path(entry["directory"]),
        registered=float(entry["registered"]),
    )


def _run_id(directory: Path) -> str | None:
    """Return the id of the run in a directory, or of its remote start; None without one."""
    for name in (RUN_FILE, REMOTE_FILE):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(read_json(directory / name)["run_id"])
    return None
