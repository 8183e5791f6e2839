"""`rl rollouts`: list the groups and rollouts of a step, and show one rollout in full."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from buckeye import runs
from buckeye.analysis.rollout_export.export import Format, export_rollouts, unreadable_in
from buckeye.base.columns import align_columns, counted, quoted
from buckeye.base.json_lines import printable
from buckeye.cli.env_options import RunArgument
from buckeye.errors import BuckeyeError, UsageError
from buckeye.monitor.metrics import StepMetrics, read_run_metrics
from buckeye.monitor.rollouts import (
    RecordedRollout,
    current_steps,
    read_rollouts,
    rollout_lines,
    rollout_steps,
    split_messages,
)
from buckeye.run_files.known_runs import find_run

_DEFAULT_LIMIT = 20
_MAX_TEXT_LENGTH = 6000
_MAX_CELL_LENGTH = 28

_OptionalText = str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFilter:
    """Conditions for rollouts; None means any.

    `task` is the id of a task, or with `task_is_part` a part of it; `search` is a part of the rollout's text
    or error. Case is ignored. An errored rollout has no reward and never meets the reward bounds.
    """

    group: int | None = None
    number: int | None = None
    task: str | None = None
    task_is_part: bool = False
    search: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    errored: bool = False
    dropped: bool = False

    def accepts(self, rollout: RecordedRollout) -> bool:
        """Return True if a rollout meets all conditions."""
        low, high, reward = self.min_reward, self.max_reward, rollout.reward
        texts = [*rollout.text, rollout.error or ""]
        return all(
            (
                self.group in (None, rollout.group),
                self.number in (None, rollout.number),
                self._accepts_task(rollout.task_id.casefold()),
                self.search is None or any(self.search.casefold() in text.casefold() for text in texts),
                low is None or (reward is not None and reward >= low),
                high is None or (reward is not None and reward <= high),
                not self.errored or rollout.reward is None,
                not self.dropped or rollout.dropped is not None,
            )
        )

    def _accepts_task(self, task_id: str) -> bool:
        if self.task is None:
            return True
        wanted = self.task.casefold()
        return wanted in task_id if self.task_is_part else wanted == task_id

    def for_tasks(self, ids: Iterable[str]) -> RolloutFilter:
        """Return this filter; if none of the `ids` is `task`, `task` becomes a part of an id."""
        if self.task is None or any(self._accepts_task(task_id.casefold()) for task_id in ids):
            return self
        print(f"No rollout of a task {self.task!r}: tasks with it in their id are shown.", file=sys.stderr)
        return replace(self, task_is_part=True)


def rollouts(
    run: RunArgument = None,
    step: Annotated[int | None, typer.Option(min=0, help="Step, as in the log. Default: the newest.")] = None,
    group: Annotated[int | None, typer.Option(min=0, help="List the rollouts of this group.")] = None,
    rollout: Annotated[
        int | None,
        typer.Option(
            metavar="K", min=0, help="Show this rollout of the group, or of the first one, in full."
        ),
    ] = None,
    task: Annotated[
        _OptionalText, typer.Option(metavar="ID", help="Only this task; else tasks with this in their id.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(metavar="X", help="Minimum reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(metavar="X", help="Maximum reward.")] = None,
    search: Annotated[
        _OptionalText, typer.Option(help="Only rollouts with this in their text or error.")
    ] = None,
    errored: Annotated[bool, typer.Option("--errored", help="Only rollouts without a reward.")] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="Only rollouts of dropped groups.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=0,
            help=f"Maximum rows; 0: all. Default: {_DEFAULT_LIMIT}, or all with --json.",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="With --rollout: do not shorten texts.")] = False,
    export: Annotated[
        Format | None,
        typer.Option("--export", help="Write files. Without --step: all rollouts, with evaluations."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New folder for --export. Default: exports/rollouts-FORMAT."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show or export the rollouts of a run.

    Shows the groups of a step, the rollouts of a group, or one rollout with text, reward and components. Exit
    code 1 if no rollout is found.
    """
    if export is not None and rollout is not None and group is None:
        hint = "Add --group: every group numbers its rollouts"
        raise UsageError("--export with --rollout: needs --group", code="BK-CLI-MISSING", hint=hint)
    directory = find_run(run)
    conditions = RolloutFilter(
        group=group,
        number=rollout,
        task=task,
        search=search,
        min_reward=min_reward,
        max_reward=max_reward,
        errored=errored,
        dropped=dropped,
    )
    if export is not None:
        _export_rollouts(directory, export, out, conditions, step, as_json)
        return
    number = _choose_step(directory, step)
    recorded, unreadable = read_rollouts(directory, number)
    conditions = conditions.for_tasks(match.task_id for match in recorded)
    matches = list(filter(conditions.accepts, recorded))
    if rollout is not None:
        matches = [match for match in matches if match.group == matches[0].group]
    if as_json:
        shown = matches[: limit or None]
        values = {"run": str(directory), "step": number, "played": len(recorded), "found": len(matches)}
        print(json.dumps({**values, "rollouts": [msgspec.to_builtins(match) for match in shown]}))
    else:
        for line in _lines(directory, number, recorded, matches, group, rollout, limit, full):
            print(line)
    if unreadable:
        warning = f"step {number}: {counted(unreadable, 'line')} skipped, not valid rollouts"
        typer.echo(f"warning: {warning}", err=True)
    if not matches:
        raise typer.Exit(1)


def _export_rollouts(
    run: Path, kind: Format, out: Path | None, conditions: RolloutFilter, step: int | None, as_json: bool
) -> None:
    opened, directory = runs.open(run), out or run / "exports" / f"rollouts-{kind}"
    ids = opened.query("SELECT DISTINCT task FROM rollouts WHERE ? IS NULL OR step = ?", step, step)
    accepts = conditions.for_tasks(str(task) for (task,) in ids).accepts
    written = export_rollouts(opened, kind, directory, step=step, accepts=accepts)
    values = {"run": str(run), "directory": str(directory), "found": written}
    print(json.dumps(values) if as_json else f"{directory}: {counted(written, 'rollout')}")
    for problem in unreadable_in(opened):
        typer.echo(f"warning: not exported: {problem}", err=True)


def _choose_step(run: Path, step: int | None) -> int:
    """Return the step to show. Raises UsageError if it has no rollouts, BuckeyeError if the run has none."""
    steps = rollout_steps(run)
    if not steps:
        hint = "Wait for the first step; `buckeye rl clean` deletes rollouts"
        raise BuckeyeError(f"{run} has no rollouts", code="BK-RUN-NO-DATA", hint=hint)
    if step is not None and step not in steps:
        hint = f"Use one of the {counted(len(steps), 'step')}, from {steps[0]} to {steps[-1]}"
        raise UsageError(
            f"--step {step}: {run} has no rollouts of this step", code="BK-RUN-NO-DATA", hint=hint
        )
    return (current_steps(run) or steps)[-1] if step is None else step


def _lines(
    run: Path,
    step: int,
    recorded: Sequence[RecordedRollout],
    matches: Sequence[RecordedRollout],
    group: int | None,
    rollout: int | None,
    limit: int | None,
    full: bool,
) -> Iterator[str]:
    command = f"buckeye rl rollouts {quoted(run)} --step {step}"
    yield _header(run, step, recorded)
    if not matches:
        yield "No rollout matches."
    elif rollout is not None:
        for match in matches:
            yield from rollout_lines(match, None if full else _MAX_TEXT_LENGTH)
    else:
        rows = _rollout_rows(matches) if group is not None else _group_rows(matches)
        shown = rows[1:][: _DEFAULT_LIMIT if limit is None else limit or None]
        yield ""
        yield align_columns([rows[0], *shown])
        if left_out := len(rows) - 1 - len(shown):
            yield f"({left_out} more; -n 0 shows all)"
        first = matches[0]
        yield ""
        if group is None:
            yield f"Rollouts of the first row: {command} --group {first.group}"
        yield f"Prompt and reply of the first row: {command} --group {first.group} --rollout {first.number}"


def _header(run: Path, step: int, recorded: Sequence[RecordedRollout]) -> str:
    """Return two lines about the step: its state and reward, and the number of rollouts."""
    metrics = next(
        (known for known in read_run_metrics(run / "metrics.jsonl").steps() if known.number == step),
        StepMetrics(step, {}),
    )
    if metrics.trained is not None:
        state = "trained"
    elif "orchestrator" in metrics.records:
        state = "not trained yet"
    else:
        state = "no batch (the step is not complete, or the run was resumed from an earlier step)"
    reward = f", reward {metrics.reward:.4f}" if metrics.reward is not None else ""
    ended = _without_retried(recorded)
    cut = sum(rollout.truncated for rollout in ended)
    errored = sum(rollout.reward is None for rollout in ended)
    retried = f", {len(recorded) - len(ended)} retried" if len(ended) < len(recorded) else ""
    return (
        f"{run.absolute().name}, step {step}: {state}{reward}\n"
        f"{counted(len(ended), 'rollout')}, {cut} cut off, {errored} errored{retried}"
    )


def _without_retried(attempts: Sequence[RecordedRollout]) -> list[RecordedRollout]:
    """Return the last attempt of each rollout."""
    return [attempt for attempt in attempts if not attempt.retried]


def _group_rows(matches: Sequence[RecordedRollout]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("group", "task", "rollouts", "mean", "lowest", "highest", "cut off", "errored", "dropped")
    ]
    for (dropped, number), members in groupby(matches, key=lambda match: (match.dropped, match.group)):
        attempts = list(members)
        group = _without_retried(attempts) or attempts
        rewards = [rollout.reward for rollout in group if rollout.reward is not None]
        spread = [statistics.fmean(rewards), min(rewards), max(rewards)] if rewards else []
        rows.append(
            (
                str(number),
                _cell(group[0].task_id),
                str(len(group)),
                *([f"{value:.4f}" for value in spread] or ["-"] * 3),
                str(sum(rollout.truncated for rollout in group) or ""),
                str(sum(rollout.reward is None for rollout in group) or ""),
                _cell(dropped or ""),
            )
        )
    return rows


def _rollout_rows(matches: Sequence[RecordedRollout]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("rollout", "reward", "tokens", "turns", "stop reason", "end or error")]
    for match in matches:
        reward = f"{match.reward:.4f}" if match.reward is not None else "errored"
        stop_reason = f"{match.stop_reason}{', cut off' if match.truncated else ''}"
        stop_reason += ", retried" if match.retried else ""
        text = match.error
        if text is None:
            text = split_messages(match.text[-1] if match.text else "")[-1][1]
        row = (str(match.number), reward, str(match.completion_tokens), str(match.turns), _cell(stop_reason))
        rows.append((*row, _cell(text, end=match.error is None)))
    return rows


def _cell(text: str, *, end: bool = False) -> str:
    """Return a text as one short line: its beginning, or its end."""
    line = printable(" ".join(text.split()))
    if len(line) <= _MAX_CELL_LENGTH:
        return line
    return f"…{line[1 - _MAX_CELL_LENGTH :]}" if end else f"{line[: _MAX_CELL_LENGTH - 1]}…"
