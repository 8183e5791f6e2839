"""`rl rollouts`: the rollouts of a step, its groups, and one rollout in full."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from buckeye import runs
from buckeye.analysis.rollout_export.export import Format, export_rollouts, unreadable_in
from buckeye.base.columns import align_columns, counted
from buckeye.base.json_lines import printable
from buckeye.errors import BuckeyeError, UsageError
from buckeye.monitor.metrics import StepMetrics, read_run_metrics
from buckeye.monitor.rollouts import (
    RecordedRollout,
    read_rollouts,
    rollout_lines,
    rollout_steps,
    split_messages,
)
from buckeye.run_files.known_runs import find_run

_SHOWN = 20
_LONGEST_TEXT = 6000
_LONGEST_CELL = 28

_Text = str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFilter:
    """Conditions for rollouts; None means any.

    `task` and `search` are case-insensitive substrings: of the task's id, and of the rollout's text and
    errors. An errored rollout has no reward and never meets the reward bounds.
    """

    group: int | None = None
    number: int | None = None
    task: str | None = None
    search: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    errored: bool = False
    dropped: bool = False

    def accepts(self, rollout: RecordedRollout) -> bool:
        """Return True if a rollout meets all conditions."""
        low, high, reward = self.min_reward, self.max_reward, rollout.reward
        said = [*rollout.text, rollout.error or ""]
        return all(
            (
                self.group in (None, rollout.group),
                self.number in (None, rollout.number),
                self.task is None or self.task.casefold() in rollout.task_id.casefold(),
                self.search is None or any(self.search.casefold() in text.casefold() for text in said),
                low is None or (reward is not None and reward >= low),
                high is None or (reward is not None and reward <= high),
                not self.errored or rollout.reward is None,
                not self.dropped or rollout.dropped is not None,
            )
        )


def rollouts(
    run: Annotated[
        _Text,
        typer.Argument(metavar="RUN", help="A directory, name or id. Default: ./outputs, or the newest run."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Whose batch, as the log counts them. Default: the newest.")
    ] = None,
    group: Annotated[int | None, typer.Option(min=0, help="Only this group; lists its rollouts.")] = None,
    rollout: Annotated[
        int | None, typer.Option(metavar="K", min=0, help="With --group: this rollout of it, in full.")
    ] = None,
    task: Annotated[_Text, typer.Option(help="Only tasks with this in their id.")] = None,
    min_reward: Annotated[float | None, typer.Option(metavar="X", help="Only rewards from here.")] = None,
    max_reward: Annotated[float | None, typer.Option(metavar="X", help="Only rewards up to here.")] = None,
    search: Annotated[_Text, typer.Option(help="Only with this in the text or the error.")] = None,
    errored: Annotated[bool, typer.Option("--errored", help="Only those without a reward.")] = False,
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Only of groups that were not trained on.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=0, help=f"Lines; 0 for all. Default {_SHOWN}, of JSON all."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="With --rollout: leave no text out.")] = False,
    export: Annotated[
        Format | None,
        typer.Option("--export", help="Write it for other tools; without --step all, and evaluations too."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of --export: new; default exports/rollouts-FORMAT.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """See what was played: the groups of a step, the rollouts of a group, one rollout with its text, reward
    and components; or write them as files. Exit code 1 if nothing is found."""
    if rollout is not None and group is None:
        raise UsageError("--rollout counts within a group; name that with --group")
    directory = find_run(run)
    wanted = RolloutFilter(
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
        _export(directory, export, out, wanted, step)
        return
    number = _chosen_step(directory, step)
    played, unreadable = read_rollouts(directory, number)
    found = list(filter(wanted.accepts, played))
    if as_json:
        shown = found[: limit or None]
        values = {"run": str(directory), "step": number, "played": len(played), "found": len(found)}
        print(json.dumps({**values, "rollouts": [msgspec.to_builtins(one) for one in shown]}))
    else:
        for line in _lines(directory, number, played, found, group, rollout, limit, full):
            print(line)
    if unreadable:
        typer.echo(f"warning: {unreadable} lines of step {number} are no rollouts and are left out", err=True)
    if not found:
        raise typer.Exit(1)


def _export(run: Path, kind: Format, out: Path | None, wanted: RolloutFilter, step: int | None) -> None:
    opened, directory = runs.open(run), out or run / "exports" / f"rollouts-{kind}"
    written = export_rollouts(opened, kind, directory, step=step, accepts=wanted.accepts)
    print(f"{directory}: {counted(written, 'rollout')}")
    for problem in unreadable_in(opened):
        typer.echo(f"warning: left out: {problem}", err=True)


def _chosen_step(run: Path, step: int | None) -> int:
    """Return the step to show. Raises UsageError if its rollouts are missing, BuckeyeError if all are."""
    steps = rollout_steps(run)
    if not steps:
        raise BuckeyeError(f"{run} holds no rollouts: none was played yet, or they were deleted (rl clean)")
    if step is not None and step not in steps:
        raise UsageError(
            f"--step {step}: {run} has rollouts of "
            f"{counted(len(steps), 'step')}, from {steps[0]} to {steps[-1]}"
        )
    return steps[-1] if step is None else step


def _lines(
    run: Path,
    step: int,
    played: Sequence[RecordedRollout],
    found: Sequence[RecordedRollout],
    group: int | None,
    rollout: int | None,
    limit: int | None,
    full: bool,
) -> Iterator[str]:
    command = f"buckeye rl rollouts {shlex.quote(str(run))} --step {step}"
    yield _header(run, step, played)
    if not found:
        yield "No rollout is as asked for."
    elif rollout is not None:
        for one in found:
            yield from rollout_lines(one, None if full else _LONGEST_TEXT)
    else:
        rows = _rollout_rows(found) if group is not None else _group_rows(found)
        yield ""
        yield align_columns([rows[0], *_limited(rows[1:], limit)])
        left_out = len(rows) - 1 - len(_limited(rows[1:], limit))
        if left_out:
            yield f"({left_out} more; -n 0 shows all)"
        first = found[0]
        more = f"--group {first.group}" if group is None else f"--group {group} --rollout {first.number}"
        yield f"\nMore of the first: {command} {more}"


def _header(run: Path, step: int, played: Sequence[RecordedRollout]) -> str:
    """Return a line about the step, joined from the records of all processes."""
    known = next(
        (one for one in read_run_metrics(run / "metrics.jsonl").steps() if one.number == step),
        StepMetrics(step, {}),
    )
    if known.trained is not None:
        state = "trained"
    elif "orchestrator" in known.records:
        state = "waits to be trained on"
    else:
        state = "no batch that counts (the run has not got so far, or began again before it)"
    reward = f", reward {known.reward:.4f}" if known.reward is not None else ""
    cut, errored = sum(one.truncated for one in played), sum(one.reward is None for one in played)
    return (
        f"{run.absolute().name}, step {step}: {state}{reward}\n"
        f"{counted(len(played), 'rollout')}, {cut} cut off, "
        f"{errored} errored"
    )


def _limited(rows: Sequence[tuple[str, ...]], limit: int | None) -> Sequence[tuple[str, ...]]:
    return rows[: _SHOWN if limit is None else limit or None]


def _group_rows(found: Sequence[RecordedRollout]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("group", "task", "rollouts", "mean", "lowest", "highest", "cut off", "errored", "dropped")
    ]
    for (dropped, number), members in groupby(found, key=lambda one: (one.dropped, one.group)):
        group = list(members)
        rewards = [one.reward for one in group if one.reward is not None]
        spread = [statistics.fmean(rewards), min(rewards), max(rewards)] if rewards else []
        rows.append(
            (
                str(number),
                _cell(group[0].task_id),
                str(len(group)),
                *([f"{value:.4f}" for value in spread] or ["-"] * 3),
                str(sum(one.truncated for one in group) or ""),
                str(sum(one.reward is None for one in group) or ""),
                _cell(dropped or ""),
            )
        )
    return rows


def _rollout_rows(found: Sequence[RecordedRollout]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("rollout", "reward", "tokens", "turns", "ended by", "its last words")]
    for one in found:
        reward = f"{one.reward:.4f}" if one.reward is not None else "errored"
        ended = f"{one.stop_reason}{', cut off' if one.truncated else ''}"
        said = one.error if one.error is not None else split_messages(one.text[-1] if one.text else "")[-1][1]
        row = (str(one.number), reward, str(one.completion_tokens), str(one.turns), _cell(ended))
        rows.append((*row, _cell(said, end=one.error is None)))
    return rows


def _cell(text: str, *, end: bool = False) -> str:
    """Return a text as one short line: its beginning, or its end."""
    line = printable(" ".join(text.split()))
    if len(line) <= _LONGEST_CELL:
        return line
    return f"…{line[1 - _LONGEST_CELL :]}" if end else f"{line[: _LONGEST_CELL - 1]}…"


COMMANDS = {"rl rollouts": rollouts}
