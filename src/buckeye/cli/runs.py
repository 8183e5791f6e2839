"""`buckeye rl COMMAND` on existing runs: list, status, logs, stop, resume, fork, clean."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from buckeye.base.columns import counted, quoted
from buckeye.base.disk import human_bytes
from buckeye.base.json_lines import printable
from buckeye.base.process import PYTHON
from buckeye.cli.env_options import RunArgument
from buckeye.cli.run_texts import (
    cleaning_table,
    event_line,
    run_list,
    status_text,
)
from buckeye.errors import BuckeyeError, UsageError
from buckeye.launch.changed_settings import settings_history
from buckeye.remote.control import stop_remote
from buckeye.run_files.directory import is_in_use, lock_directory
from buckeye.run_files.events import read_events
from buckeye.run_files.known_runs import find_run, is_remote, known_runs
from buckeye.run_files.logs import LogLine, follow_logs, read_logs
from buckeye.run_files.record import ACTIVE_STATES, read_record
from buckeye.runs.clean import FILE_KINDS, KINDS_IN_USE, Deletable, Kind, delete_files, find_deletable
from buckeye.runs.fork import fork_run
from buckeye.runs.status import run_status
from buckeye.runs.stop import continuation, stop_run

_FOLLOW_SECONDS = 0.3

_NamedRun = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, name or id.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_runs(as_json: _Json = False) -> None:
    """List the runs of this user, newest first."""
    known, missing = known_runs()
    runs = []
    for known_run in known:
        try:
            runs.append(run_status(known_run.directory, measure_disk=False))
        except BuckeyeError as error:
            typer.echo(f"warning: {error}", err=True)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(run) for run in runs]))
        return
    typer.echo(run_list(runs) if runs else "You have no runs.")
    if missing:
        typer.echo(
            f"{counted(missing, 'run')} not listed: the directory is deleted, or has another run", err=True
        )


def status(
    run: RunArgument = None,
    as_json: _Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the run ends.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between refreshes.")] = 2.0,
) -> None:
    """Show state, progress, waits, disk and checkpoints of a run."""
    directory = find_run(run)
    try:
        while True:
            seen = run_status(directory)
            clear = "\x1b[H\x1b[2J" if watch and not as_json and sys.stdout.isatty() else ""
            text = (
                json.dumps(dataclasses.asdict(seen)) if as_json else printable(status_text(seen, time.time()))
            )
            typer.echo(clear + text)
            if not watch or seen.state not in ACTIVE_STATES:
                return
            time.sleep(interval)
    except KeyboardInterrupt:
        return


def logs(
    run: RunArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log, across resumes.")] = False,
    process: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only this process: rl, inference, orchestrator, trainer, trainer_1 ..."
        ),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of newest lines or events; 0: all.")
    ] = 200,
    attempt: Annotated[int | None, typer.Option(help="Show an earlier attempt.")] = None,
    events: Annotated[
        bool,
        typer.Option(
            "--events", help="Show events in place of logs: starts, restarts, checkpoints, weights, end."
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show the logs of all processes of a run, ordered by time; or its events."""
    directory = find_run(run)
    if events:
        if follow or process is not None:
            hint = "Leave --follow and --process out"
            raise UsageError("--events excludes --follow and --process", code="BK-CLI-CONFLICT", hint=hint)
        _print_events(directory, attempt=attempt, last=lines, as_json=as_json)
        return
    if follow and attempt is not None:
        hint = "Leave --attempt out"
        raise UsageError("--follow shows the newest attempt", code="BK-CLI-CONFLICT", hint=hint)
    try:
        if not follow:
            _print_lines(read_logs(directory, attempt=attempt, process=process), last=lines, as_json=as_json)
            return
        for number, new_lines in enumerate(follow_logs(directory, process=process)):
            _print_lines(new_lines, last=0 if number else lines, as_json=as_json)
            time.sleep(_FOLLOW_SECONDS)
    except KeyboardInterrupt:
        return


def stop(
    run: _NamedRun,
    now: Annotated[bool, typer.Option("--now", help="Kill the run, without a checkpoint.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds to wait. Default: the time limits of the run.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Stop a run: the trainer finishes its step and writes a checkpoint. Returns when all processes ended."""
    directory = find_run(run)
    stop_function = stop_remote if is_remote(directory) else stop_run
    try:
        result = stop_function(
            directory, now=now, timeout=timeout, tell=lambda line: typer.echo(line, err=True)
        )
    except KeyboardInterrupt:
        typer.echo(
            f"The run is still stopping. To kill it: buckeye rl stop {quoted(directory)} --now",
            err=True,
        )
        raise
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    if not result.was_running:
        typer.echo(f"{directory}: not running ({result.state})")
        return
    typer.echo(f"{directory}: {result.state}, all processes ended")
    if result.checkpoint_step is not None:
        typer.echo(f"newest checkpoint: step {result.checkpoint_step}")
        typer.echo(f"to resume: buckeye rl resume {quoted(directory)}")


def resume(context: typer.Context, run: _NamedRun, as_json: _Json = False) -> None:
    """Resume a run from its newest checkpoint, with its original flags and the flags of `rl` that you add.

    Prints the command and its folder, then the output of the run.
    """
    resumed = continuation(find_run(run), context.args)
    argv, folder = ["rl", *resumed.arguments], str(resumed.working_directory)
    command = json.dumps({"command": argv, "working_directory": folder})
    typer.echo(command if as_json else f"in {folder}: {shlex.join(argv)}")
    sys.stdout.flush()
    os.chdir(folder)
    os.execv(PYTHON[0], [*PYTHON, "-m", "buckeye", *argv])  # noqa: S606  a list of args, without a shell


def clean(
    run: _NamedRun,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files; delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help=f"Delete only this kind: {', '.join(FILE_KINDS)}."),
    ] = None,
    checkpoints: Annotated[
        int | None,
        typer.Option(
            metavar="KEEP", min=1, help="Also delete checkpoints, except the newest KEEP and the best."
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Delete unneeded files of a run, but no files that an active run uses. Asks first."""
    directory = find_run(run)
    kinds = _kinds(only, checkpoints)
    if not (dry_run or yes) and (as_json or not sys.stdin.isatty()):
        raise UsageError(
            "deleting files needs a confirmation, and stdin is not a terminal",
            code="BK-CLI-CONFIRM",
            hint="Pass --yes to delete, or --dry-run to show the files",
        )
    in_use = is_in_use(directory)
    if in_use:
        kinds = _unused_kinds(kinds, only)
    with nullcontext() if dry_run or in_use else lock_directory(directory):
        items = find_deletable(directory, kinds=kinds, keep_checkpoints=checkpoints)
        if dry_run:
            _show_deletable(items, as_json, False)
            return
        if items and not yes:
            typer.echo(cleaning_table(items))
            if not typer.confirm("Delete these files?"):
                typer.echo("Nothing was deleted.")
                return
        delete_files(items)
    _show_deletable(items, as_json, True)


def fork(
    run: _NamedRun,
    step: Annotated[str, typer.Option(metavar="N|last|best", help="Checkpoint to start from.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="New run directory.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Create a new run from a checkpoint of another run, which is not changed.

    The new run has the settings of the last start of the other run.
    """
    fork_directory = fork_run(find_run(run), step=step, target=output)
    record = read_record(fork_directory)
    changes = [change for change in settings_history(fork_directory) if change.step == record.start_step]
    if as_json:
        values = {"run_id": record.run_id, "directory": str(fork_directory), "step": record.start_step}
        later = [{"key": change.key, "old": change.old, "new": change.new} for change in changes]
        typer.echo(json.dumps(values | {"later_settings": later}))
        return
    typer.echo(f"{fork_directory} ({record.run_id}): forked at step {record.start_step}.")
    if changes:
        typer.echo("It has the settings of the last start of the run, which changed after that step:")
        for change in changes:
            typer.echo(f"  {change.key}: {json.dumps(change.old)} -> {json.dumps(change.new)}")
    typer.echo("To start it, with flags to change settings if needed:")
    typer.echo(f"  buckeye rl resume {quoted(fork_directory)}")


def _print_events(directory: Path, *, attempt: int | None, last: int, as_json: bool) -> None:
    events = [event for event in read_events(directory) if attempt in (None, event["attempt"])]
    if attempt is not None and not events:
        raise UsageError(
            f"--attempt {attempt}: no events of this attempt",
            code="BK-CLI-ARGUMENT",
            hint="Leave --attempt out to see the events of all attempts",
        )
    for event in events[_left_out(events, last, "earlier event") :]:
        typer.echo(json.dumps(event) if as_json else event_line(event))


def _print_lines(lines: Sequence[LogLine], *, last: int, as_json: bool) -> None:
    width = max((len(line.process) for line in lines), default=0)
    for line in lines[_left_out(lines, last, "earlier line") :]:
        typer.echo(
            json.dumps(dataclasses.asdict(line), ensure_ascii=False)
            if as_json
            else f"{line.process:<{width}} | {printable(line.text)}"
        )


def _left_out(items: Sequence[object], last: int, name: str) -> int:
    """Return the number of items before the `last` ones (0: all are shown), and report it on stderr."""
    left_out = max(0, len(items) - last) if last else 0
    if left_out:
        typer.echo(f"({counted(left_out, name)} left out; -n 0 shows all)", err=True)
    return left_out


def _kinds(only: Sequence[str] | None, checkpoints: int | None) -> list[Kind]:
    unknown = [kind for kind in only or [] if kind not in FILE_KINDS]
    if unknown:
        hint = f"Use one of: {', '.join(FILE_KINDS)}"
        raise UsageError(f"--only: no kind named {unknown[0]!r}", code="BK-CLI-ARGUMENT", hint=hint)
    if only and "checkpoints" in only and checkpoints is None:
        hint = "Add --checkpoints KEEP: the number of newest checkpoints to keep"
        raise UsageError("--only checkpoints: needs --checkpoints", code="BK-CLI-MISSING", hint=hint)
    return [kind for kind in FILE_KINDS if not only or kind in only]


def _unused_kinds(kinds: Sequence[Kind], only: Sequence[str] | None) -> list[Kind]:
    """Return the kinds of files that can be deleted while the run is active."""
    used = [kind for kind in only or [] if kind in KINDS_IN_USE]
    if used:
        message = f"--only {used[0]}: the run is active and uses its {used[0]}"
        raise UsageError(message, code="BK-RUN-ACTIVE", hint="Stop the run first: `buckeye rl stop RUN`")
    typer.echo(f"The run is active: its {' and '.join(KINDS_IN_USE)} are kept.", err=True)
    return [kind for kind in kinds if kind not in KINDS_IN_USE]


def _show_deletable(items: Sequence[Deletable], as_json: bool, deleted: bool) -> None:
    size = sum(item.size for item in items)
    if as_json:
        records: list[dict[str, Any]] = [
            {**dataclasses.asdict(item), "path": str(item.path)} for item in items
        ]
        typer.echo(json.dumps({"deleted": deleted, "size": size, "items": records}))
    elif not items:
        typer.echo("No files to delete.")
    elif deleted:
        typer.echo(f"Deleted {counted(len(items), 'item')}, {human_bytes(size)}.")
    else:
        typer.echo(cleaning_table(items))
