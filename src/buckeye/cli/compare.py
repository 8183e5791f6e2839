"""`buckeye rl compare`: compare two runs, two evaluations, or a run before and after training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buckeye.base.columns import align_columns, counted
from buckeye.base.json_lines import printable
from buckeye.errors import UsageError

if TYPE_CHECKING:
    from buckeye.analysis.comparison.compare import RunComparison
    from buckeye.analysis.comparison.differences import RunDifference
    from buckeye.analysis.comparison.evaluations import EvaluationsComparison

_FIRST_HELP = "Run directory, name or id; or a folder of `buckeye eval`."
_SECOND_HELP = "The same. Without it: run A before and after training, by its evaluations."
_MAX_VALUE_LENGTH = 60  # characters


def compare_runs(
    a: Annotated[str, typer.Argument(metavar="A", help=_FIRST_HELP)],
    b: Annotated[str | None, typer.Argument(metavar="B", help=_SECOND_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two runs, two evaluations, or one run before and after training: which is better, by how much.

    For two runs, prints differences in settings, versions, machines and tasks, then evaluations and rewards
    by step. The exit code is 1 if the runs are not comparable.
    """
    from buckeye.analysis.comparison.compare import compare

    if (evaluations := _compare_evaluations(a, b)) is not None:
        lines = _evaluation_lines(evaluations)
        print(json.dumps(dataclasses.asdict(evaluations)) if as_json else printable("\n".join(lines)))
        return
    assert b is not None  # one run was compared with itself
    comparison = compare(a, b)
    if as_json:
        print(json.dumps(dataclasses.asdict(comparison), default=str))
    else:
        print(printable("\n".join(_comparison_lines(comparison))))
    if comparison.verdict.outcome == "not comparable":
        raise typer.Exit(1)


def _compare_evaluations(a: str, b: str | None) -> EvaluationsComparison | None:
    """Return the comparison of two folders of `buckeye eval`, or of one run; None for two runs."""
    from buckeye.analysis.comparison.evaluations import (
        compare_eval_folders,
        compare_first_and_last,
        is_evaluation,
    )

    folders = [name for name in (a, b) if name is not None and is_evaluation(name)]
    if len(folders) == 2:
        return compare_eval_folders(*folders)
    if folders:
        raise UsageError(
            f"{folders[0]} is an evaluation, and is compared with another evaluation",
            code="BK-CLI-ARGUMENT",
            hint=f"name a second folder of `buckeye eval`: buckeye rl compare {folders[0]} OTHER",
        )
    return compare_first_and_last(a) if b is None else None


def _evaluation_lines(comparison: EvaluationsComparison) -> Iterator[str]:
    from buckeye.analysis.comparison.compare import judge

    for found in comparison.environments:
        by = f"{found.environment}, {counted(found.difference.n, 'task')}"
        yield judge(found.a, found.b, found.difference, by).sentence
    yield from ("", f"A  {comparison.a}", f"B  {comparison.b}", "")
    if comparison.settings:
        yield from _difference_table("settings", comparison.settings)
    yield from _figure_table("environment", [(found.environment, found) for found in comparison.environments])
    yield from ("", "95 % intervals over tasks; B - A compares task by task")
    for found in comparison.environments:
        if found.unshared:
            yield f"{found.environment}: {counted(found.unshared, 'task')} of only one evaluation left out"


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
