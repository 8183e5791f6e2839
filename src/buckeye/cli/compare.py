"""`buckeye rl compare`: two runs side by side."""

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

_NAMED = "A run's directory, name or id."
_LONGEST = 60  # maximum characters of a setting


def compare_runs(
    a: Annotated[str, typer.Argument(metavar="A", help=_NAMED)],
    b: Annotated[str, typer.Argument(metavar="B", help=_NAMED)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether run B is better than run A and by how much, and what is different about them: settings,
    versions, tasks, machines, and the reward by step. Exit code 1 if that cannot be said."""
    from buckeye.analysis.comparison.compare import compare

    found = compare(a, b)
    print(
        json.dumps(dataclasses.asdict(found), default=str) if as_json else printable("\n".join(_text(found)))
    )
    if found.verdict.outcome == "not comparable":
        raise typer.Exit(1)


def _text(found: RunComparison) -> Iterator[str]:
    yield from (found.verdict.sentence, "", f"A  {found.a}", f"B  {found.b}", "")
    yield from _table("settings", found.settings)
    yield from _table("versions", found.versions)
    yield from _table("machines", found.machines)
    yield from _tasks(found)
    yield from _evaluations(found)
    yield from _parts(found)
    yield from (f"not looked at: {what}" for what in found.unreadable)


def _table(title: str, rows: Sequence[RunDifference]) -> Iterator[str]:
    if not rows:
        yield f"{title}: no difference is recorded"
        return
    shown = [(f"  {row.name}", _value(row.a), _value(row.b)) for row in rows]
    yield align_columns([(title, "A", "B"), *shown])


def _value(value: Any) -> str:
    if isinstance(value, str):  # the end of a path is more informative than its beginning
        return value if len(value) <= _LONGEST else f"...{value[3 - _LONGEST :]}"
    text = "-" if value is None else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _tasks(found: RunComparison) -> Iterator[str]:
    for one in found.tasks:
        changed = f", {one.changed} of the same name with another prompt" if one.changed else ""
        what = "tasks trained on" if one.split == "train" else "tasks of the evaluation"
        yield f"{what}: {one.a} in A, {one.b} in B, {one.shared} in both{changed}"


def _evaluations(found: RunComparison) -> Iterator[str]:
    from buckeye.analysis.comparison.compare import shown

    if found.evaluations:
        rows = [
            (f"  version {one.version}", shown(one.a), shown(one.b), shown(one.difference, sign=True))
            for one in found.evaluations
        ]
        yield "\n" + align_columns([("evaluation", "A", "B", "B - A"), *rows])


def _parts(found: RunComparison) -> Iterator[str]:
    from buckeye.analysis.comparison.compare import shown, step_range_text

    if found.parts:
        rows = [
            (f"  {step_range_text(part)}", shown(part.a), shown(part.b), shown(part.difference, sign=True))
            for part in found.parts
        ]
        yield "\n" + align_columns([("reward by step", "A", "B", "B - A"), *rows])


COMMANDS = {"rl compare": compare_runs}
