"""Logs of a run's processes: read them in order of time, follow them, and delete old logs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json, remove_directory
from buckeye.errors import UsageError
from buckeye.monitor.log import run_log
from buckeye.run_files.directory import LOG_FOLDER, RUN_FILE, attempt_logs, earlier_logs

LAUNCHER = "rl"

_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d):([0-5]\d) ")
_DATED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ \[([^\]]+)\] (.*)")
_HALF_A_DAY = timedelta(hours=12)
_VISIBLE_LINES = 60  # lines that the user's screen may still show
_RUN_FILE_HINT = "pass the directory of a run, or restore this file"


@dataclass(frozen=True, slots=True)
class LogLine:
    """Log line with its process.

    `time` is in seconds since the epoch. A line without a time has the time of the line before it.
    """

    time: float
    process: str
    text: str


def read_logs(output_dir: Path, *, attempt: int | None = None, process: str | None = None) -> list[LogLine]:
    """Return the lines of one attempt, by default the newest, in order of time.

    `process` selects a process (`trainer_1`) or a kind (`trainer`). Raise `UsageError` if the process or the
    attempt does not exist.
    """
    starts = attempt_starts(output_dir)
    newest = max(starts)
    chosen = newest if attempt is None else attempt
    if chosen not in starts:
        raise UsageError(
            f"--attempt {chosen}: no such attempt in {output_dir}",
            code="BK-CLI-ARGUMENT",
            hint=f"pass a number from {min(starts)} to {newest}",
        )
    after = min((start for number, start in starts.items() if number > chosen), default=float("inf"))
    started = int(starts[chosen])  # the times of most lines have whole seconds
    sources = _sources(output_dir, starts, chosen)
    if process is not None and not any(_matches(process, source.process) for source in sources):
        processes = ", ".join(source.process for source in sources) or "none"
        raise UsageError(
            f"--process {process}: no log of this process",
            code="BK-RUN-NO-DATA",
            hint=f"processes with logs: {processes}",
        )
    lines = [line for source in sources for line in source.new(whole=False) if started <= line.time < after]
    return _in_order(lines, process)


def was_logged(output_dir: Path, text: str) -> bool:
    """Return True if one of the last `_VISIBLE_LINES` lines of the run's log has this text."""
    try:
        with run_log(output_dir).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _VISIBLE_LINES * 500))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return False
    return any(text in line for line in lines[-_VISIBLE_LINES:])


def follow_logs(output_dir: Path, *, process: str | None = None) -> Iterator[list[LogLine]]:
    """Yield all lines of the newest attempt, then lists of the lines that are new, which may be empty.

    The iterator never ends, and includes the logs of later attempts. It does not sleep: the caller waits
    before it requests the next list.
    """
    starts = attempt_starts(output_dir)
    started = int(starts[max(starts)])
    launcher = _launcher_log(output_dir, starts[max(starts)])
    open_files: dict[Path, _LogFile] = {}
    while True:
        present = {path.resolve() for path in sorted((output_dir / LOG_FOLDER).glob("*.stdout"))}
        new = sorted(present - set(open_files))
        if new:
            starts = attempt_starts(output_dir)
        for path in new:
            with suppress(FileNotFoundError):  # not created yet, or deleted
                open_files[path] = _LogFile(path, path.stem, _start_of(path, starts))
        sources = [*launcher, *open_files.values()]
        lines = [line for source in sources for line in source.new(whole=True) if line.time >= started]
        yield _in_order(lines, process)
        open_files = {path: source for path, source in open_files.items() if path in present}
        launcher = launcher or _launcher_log(output_dir, starts[max(starts)])


def attempt_starts(output_dir: Path) -> dict[int, float]:
    """Return the start of each attempt in seconds since the epoch. Raise `UsageError` without a run."""
    path = output_dir / RUN_FILE
    try:
        attempts: list[dict[str, Any]] = read_json(path)["attempts"]
        starts = {int(entry["attempt"]): float(entry["started"]) for entry in attempts}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"invalid list of attempts: {error}", code="BK-FILE-FORMAT", at=str(path), hint=_RUN_FILE_HINT
        ) from None
    if not starts:
        raise UsageError("no attempts found", code="BK-FILE-FORMAT", at=str(path), hint=_RUN_FILE_HINT)
    return starts


def _start_of(path: Path, starts: Mapping[int, float]) -> float:
    """Return the start time of the attempt of a log.

    The folder `attempt_<N>` of the log gives the attempt. A log in another folder counts as that of the
    newest attempt.
    """
    _, _, number = path.parent.name.partition("attempt_")
    return starts.get(int(number) if number.isdecimal() else -1, starts[max(starts)])


def _sources(output_dir: Path, starts: Mapping[int, float], chosen: int) -> list[_LogFile]:
    """Return the logs of an attempt.

    A server that outlives its attempt keeps writing to the folder of the attempt that started it, so the
    folders of earlier attempts are read too.
    """
    newest: dict[str, tuple[Path, float]] = {}
    for attempt in sorted(number for number in starts if number <= chosen):
        for path in attempt_logs(output_dir, attempt).glob("*.stdout"):
            newest[path.name] = (path, starts[attempt])
    processes = [_LogFile(path, path.stem, started) for _, (path, started) in sorted(newest.items())]
    return [*_launcher_log(output_dir, starts[chosen]), *processes]


def _launcher_log(output_dir: Path, started: float) -> list[_LogFile]:
    path = run_log(output_dir)
    return [_LogFile(path, LAUNCHER, started)] if path.exists() else []


def _matches(process: str, name: str) -> bool:
    return process.replace(" ", "_") in (name, name.partition("_")[0], f"{name}_0")


def _in_order(lines: list[LogLine], process: str | None) -> list[LogLine]:
    """Return the selected lines sorted by whole seconds; the order within a process is kept."""
    selected = [line for line in lines if process is None or _matches(process, line.process)]
    return sorted(selected, key=lambda line: int(line.time))


class _LogFile:
    """Growing log of a process. `now` is the time of the last line that was read.

    `<process>.stdout` has the time of day in each line, and the date follows from the attempt's start. All
    processes share `run.log`, with dated lines. Only the launcher's lines are read from it.
    """

    def __init__(self, path: Path, process: str, started: float) -> None:
        self.process = process
        self.now = datetime.fromtimestamp(started)
        self._started = self.now.replace(microsecond=0)
        self._is_own_line = process != LAUNCHER
        self._file = path.open("rb")
        self._rest = b""

    def new(self, *, whole: bool) -> list[LogLine]:
        """Return the lines since the last call; with `whole`, an unfinished last line is kept for later."""
        data = self._rest + self._file.read()
        end = data.rfind(b"\n") + 1 if whole else len(data)
        self._rest = data[end:]
        read = self._read_dated if self.process == LAUNCHER else self._read_clock
        texts = map(read, data[:end].decode(errors="replace").splitlines())
        return [LogLine(self.now.timestamp(), self.process, text) for text in texts if self._is_own_line]

    def _read_clock(self, text: str) -> str:
        """Set the time from the time of day in a line, and return the line."""
        if match := _CLOCK.match(text):
            hour, minute, second = map(int, match.groups())
            time = self.now.replace(hour=hour, minute=minute, second=second, microsecond=0)
            self.now = max(self.now, time + timedelta(days=1) if self.now - time > _HALF_A_DAY else time)
        return text

    def _read_dated(self, text: str) -> str:
        """Set the time and the process from a dated line, and return it without its date."""
        if match := _DATED.match(text):
            stamp, process, text = match.groups()
            time = datetime.fromisoformat(stamp)
            self._is_own_line = process == LAUNCHER and time >= self._started
            self.now = max(self.now, time)
            text = f"{stamp.partition(' ')[2]} {text}"
        return text


def prune_logs(output_dir: Path, keep: int | None) -> None:
    """Delete the logs of finished attempts except the newest `keep`. None: delete nothing."""
    if keep is None:
        return
    by_number = sorted(earlier_logs(output_dir), key=lambda path: int(path.name.removeprefix("attempt_")))
    for path in by_number[:-keep]:
        remove_directory(path)
