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

from buckeye.base.disk import human_bytes
from buckeye.base.json_lines import printable
from buckeye.cli.run_texts import (
    cleaning_table,
    event_line,
    run_list,
    status_text,
)
from buckeye.errors import BuckeyeError, UsageError
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

_Run = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="A directory, name or id. Default: ./outputs, or the newest run."),
]
_NamedRun = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, name or id.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_runs(as_json: _Json = False) -> None:
    """The runs that were started by this user, newest first."""
    known, gone = known_runs()
    runs = []
    for one in known:
        try:
            runs.append(run_status(one.directory, measure_disk=False))
        except BuckeyeError as error:
            typer.echo(f"warning: {error}", err=True)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(run) for run in runs]))
        return
    typer.echo(run_list(runs) if runs else "No run is known.")
    if gone:
        typer.echo(f"{gone} more: their directories are gone, or hold another run now", err=True)


def status(
    run: _Run = None,
    as_json: _Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the run ends.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between refreshes.")] = 2.0,
) -> None:
    """State, progress, who waits for whom, disk and checkpoints of a run."""
    directory = find_run(run)
    try:
        while True:
            seen = run_status(directory)
            clear = "\x1b[H\x1b[2J" if watch and not as_json and sys.stdout.isatty() else ""
            text = json.dumps(dataclasses.asdict(seen)) if as_json else status_text(seen, time.time())
            typer.echo(clear + text)
            if not watch or seen.state not in ACTIVE_STATES:
                return
            time.sleep(interval)
    except KeyboardInterrupt:
        return


def logs(
    run: _Run = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on, also after a resume.")] = False,
    process: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only rl, inference, orchestrator, trainer, trainer_1 ..."),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="How many of the last; 0 for all.")
    ] = 200,
    attempt: Annotated[int | None, typer.Option(help="Those of an earlier start of the run.")] = None,
    events: Annotated[
        bool,
        typer.Option("--events", help="Events instead: starts, restarts, checkpoints, weights, the end."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show what the processes of a run print, in the order of time; or its events."""
    directory = find_run(run)
    if events:
        if follow or process is not None:
            raise UsageError("--events shows what happened to the run; leave --follow and --process out")
        _print_events(directory, attempt=attempt, as_json=as_json)
        return
    if follow and attempt is not None:
        raise UsageError("--follow shows the newest attempt; leave --attempt out")
    try:
        if not follow:
            _print_lines(read_logs(directory, attempt=attempt, process=process), last=lines, as_json=as_json)
            return
        for number, new in enumerate(follow_logs(directory, process=process)):
            _print_lines(new, last=0 if number else lines, as_json=as_json)
            time.sleep(_FOLLOW_SECONDS)
    except KeyboardInterrupt:
        return


def stop(
    run: _NamedRun,
    now: Annotated[bool, typer.Option("--now", help="Kill it: no checkpoint is written.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds to wait. Default: what the trainer may take.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Stop a run: the trainer finishes its step and checkpoints. Returns when nothing of it is left."""
    directory = find_run(run)
    elsewhere = is_remote(directory)
    stop_it = stop_remote if elsewhere else stop_run
    try:
        done = stop_it(directory, now=now, timeout=timeout, tell=lambda line: typer.echo(line, err=True))
    except KeyboardInterrupt:
        typer.echo(f"It goes on to stop. To end it at once: buckeye rl stop {directory} --now", err=True)
        raise
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
        return
    if not done.was_running:
        typer.echo(f"{directory} does not run: {done.state}")
        return
    typer.echo(f"{directory}: {done.state}; no process of it is left")
    if done.checkpoint_step is not None:
        typer.echo(f"its newest checkpoint is of step {done.checkpoint_step}: buckeye rl resume {directory}")


def resume(context: typer.Context, run: _NamedRun, as_json: _Json = False) -> None:
    """Go on from the newest checkpoint, as the run was started; more flags of `rl` may follow. The first line
    says what is run, and where; the others are the run's."""
    goes_on = continuation(find_run(run), context.args)
    words, place = ["rl", *goes_on.arguments], str(goes_on.working_directory)
    told = json.dumps({"command": words, "working_directory": place})
    typer.echo(told if as_json else f"in {place}: {shlex.join(words)}")
    sys.stdout.flush()
    os.chdir(goes_on.working_directory)
    os.execv(sys.executable, [sys.executable, "-m", "buckeye", "rl", *goes_on.arguments])  # noqa: S606  a list of args, without a shell


def clean(
    run: _NamedRun,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show it, delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help=f"Only this kind: {', '.join(FILE_KINDS)}.")
    ] = None,
    checkpoints: Annotated[
        int | None,
        typer.Option(metavar="KEEP", min=1, help="Also checkpoints: all but the newest KEEP and the best."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Delete what a run can do without; of one that goes on, what it does not use. Shows it, then asks."""
    directory = find_run(run)
    kinds = _kinds(only, checkpoints)
    if not (dry_run or yes) and (as_json or not sys.stdin.isatty()):
        raise UsageError("nobody can be asked here; add --yes to delete, or --dry-run to see what")
    in_use = is_in_use(directory)
    if in_use:
        kinds = _unused(kinds, only)
    with nullcontext() if dry_run or in_use else lock_directory(directory):
        items = find_deletable(directory, kinds=kinds, keep_checkpoints=checkpoints)
        if dry_run:
            _show_deletable(items, as_json, False)
            return
        if items and not yes:
            typer.echo(cleaning_table(items))
            if not typer.confirm("Delete all of it?"):
                typer.echo("Nothing was deleted.")
                return
        delete_files(items)
    _show_deletable(items, as_json, True)


def fork(
    run: _NamedRun,
    step: Annotated[str, typer.Option(metavar="N|last|best", help="The checkpoint to start from.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="A new directory.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Make a new run from a checkpoint of another one, which stays as it is."""
    made = fork_run(find_run(run), step=step, target=output)
    record = read_record(made)
    if as_json:
        typer.echo(json.dumps({"run_id": record.run_id, "directory": str(made), "step": record.start_step}))
        return
    typer.echo(f"{made} ({record.run_id}) goes on from step {record.start_step} with:")
    typer.echo(f"  buckeye rl resume {shlex.quote(str(made))}")


def _print_events(directory: Path, *, attempt: int | None, as_json: bool) -> None:
    for event in read_events(directory):
        if attempt in (None, event["attempt"]):
            typer.echo(json.dumps(event) if as_json else event_line(event))


def _print_lines(lines: Sequence[LogLine], *, last: int, as_json: bool) -> None:
    left_out = max(0, len(lines) - last) if last else 0
    if left_out:
        typer.echo(f"({left_out} earlier lines are not shown; -n 0 shows all)", err=True)
    width = max((len(line.process) for line in lines), default=0)
    for line in lines[left_out:]:
        typer.echo(
            json.dumps(dataclasses.asdict(line), ensure_ascii=False)
            if as_json
            else f"{line.process:<{width}} | {printable(line.text)}"
        )


def _kinds(only: Sequence[str] | None, checkpoints: int | None) -> list[Kind]:
    unknown = [word for word in only or [] if word not in FILE_KINDS]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: there is no such kind. There are: {', '.join(FILE_KINDS)}")
    if only and "checkpoints" in only and checkpoints is None:
        raise UsageError("--only checkpoints: say how many of the newest stay, with --checkpoints KEEP")
    return [kind for kind in FILE_KINDS if not only or kind in only]


def _unused(kinds: Sequence[Kind], only: Sequence[str] | None) -> list[Kind]:
    """Return the kinds of files that can be deleted while the run is active."""
    asked = [word for word in only or [] if word in KINDS_IN_USE]
    if asked:
        raise UsageError(f"--only {asked[0]}: the run goes on and uses its {asked[0]}; stop it first")
    typer.echo(f"The run goes on: its {' and '.join(KINDS_IN_USE)} stay.", err=True)
    return [kind for kind in kinds if kind not in KINDS_IN_USE]


def _show_deletable(items: Sequence[Deletable], as_json: bool, deleted: bool) -> None:
    size = sum(item.size for item in items)
    if as_json:
        listed: list[dict[str, Any]] = [
            {**dataclasses.asdict(item), "path": str(item.path)} for item in items
        ]
        typer.echo(json.dumps({"deleted": deleted, "size": size, "items": listed}))
    elif not items:
        typer.echo("There is nothing to delete.")
    elif deleted:
        typer.echo(f"Deleted {len(items)} files and directories, {human_bytes(size)}.")
    else:
        typer.echo(cleaning_table(items))


COMMANDS = {
    "rl list": list_runs,
    "rl status": status,
    "rl logs": logs,
    "rl stop": stop,
    "rl resume": resume,
    "rl fork": fork,
    "rl clean": clean,
}
