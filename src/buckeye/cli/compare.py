"""`buckeye rl compare`: compare two runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buckeye.base.columns import align_columns
from buckeye.base.json_lines import printable

if TYPE_CHECKING:
    from buckeye.analysis.comparison.compare import RunComparison
    from buckeye.analysis.comparison.differences import RunDifference

_RUN_HELP = "Run directory, name or id."
_MAX_VALUE_LENGTH = 60  # characters


def compare_runs(
    a: Annotated[str, typer.Argument(metavar="A", help=_RUN_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_RUN_HELP)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two runs: which run is better, by how much, and how the runs differ.

    Prints differences in settings, versions, machines and tasks, then evaluations and rewards by step. The
    exit code is 1 if the runs are not comparable.
    """
    from buckeye.analysis.comparison.compare import compare

    comparison = compare(a, b)
    if as_json:
        print(json.dumps(dataclasses.asdict(comparison), default=str))
    else:
        print(printable("\n".join(_comparison_lines(comparison))))
    if comparison.verdict.outcome == "not comparable":
        raise typer.Exit(1)


def _comparison_lines(comparison: RunComparison) -> Iterator[str]:
    from buckeye.analysis.comparison.compare import step_range_text

    yield from (comparison.verdict.sentence, "", f"A  {comparison.a}", f"B  {comparison.b}", "")
    yield from _difference_table("settings", comparison.settings)
    for name, changes in comparison.changes.items():
        for change in changes:
            values = f"{_shorten(change.old)} -> {_shorten(change.new)}"
            yield f"settings of {name.upper()} changed at step {change.step}: {change.key}: {values}"
    yield from _difference_table("versions", comparison.versions)
    yield from _difference_table("machines", comparison.machines)
    yield from _task_lines(comparison)
    versions = [(f"version {row.version}", row) for row in comparison.evaluations]
    yield from _figure_table("evaluation", versions)
    yield from _figure_table("reward by step", [(step_range_text(part), part) for part in comparison.parts])
    yield from (f"not compared: {reason}" for reason in comparison.unreadable)


def _difference_table(title: str, rows: Sequence[RunDifference]) -> Iterator[str]:
    if not rows:
        yield f"{title}: no difference is recorded"
        return
    cells = [(f"  {row.name}", _shorten(row.a), _shorten(row.b)) for row in rows]
    yield align_columns([(title, "A", "B"), *cells])


def _shorten(value: Any) -> str:
    if isinstance(value, str):  # the end of a path is more informative than its beginning
        return value if len(value) <= _MAX_VALUE_LENGTH else f"...{value[3 - _MAX_VALUE_LENGTH :]}"
    text = "-" if value is None else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."


def _task_lines(comparison: RunComparison) -> Iterator[str]:
    for tasks in comparison.tasks:
        changed = f", {tasks.changed} of them with different prompts" if tasks.changed else ""
        kind = "training tasks" if tasks.split == "train" else "evaluation tasks"
        yield f"{kind}: {tasks.a} in A, {tasks.b} in B, {tasks.shared} in both{changed}"


def _figure_table(title: str, figures: Sequence[tuple[str, Any]]) -> Iterator[str]:
    from buckeye.analysis.comparison.compare import shown

    if figures:
        rows = [
            (f"  {name}", shown(figure.a), shown(figure.b), shown(figure.difference, sign=True))
            for name, figure in figures
        ]
        yield "\n" + align_columns([(title, "A", "B", "B - A"), *rows])


COMMANDS = {"rl compare": compare_runs}
