"""Output of `buckeye env check`: tables in a terminal, aligned text elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from buckeye.base.columns import counted
from buckeye.evaluation.checks.result import CheckStatus, count_with_status

if TYPE_CHECKING:
    from buckeye.evaluation.env_check import EnvCheckReport

_STYLES: Mapping[CheckStatus, str] = {
    "error": "bold red",
    "warning": "bold yellow",
    "note": "cyan",
    "pass": "green",
    "not run": "yellow",
}
_PROBES_SHOWN = 10
_FILE_WIDTH = 10_000  # no line breaks outside a terminal


def print_report(report: EnvCheckReport) -> None:
    """Print the checks, the wrong probes, the content-free scores and a summary line to stdout."""
    if sys.stdout.isatty():
        _print(Console(), report)
        return
    output = io.StringIO()
    _print(Console(file=output, width=_FILE_WIDTH), report)
    for line in output.getvalue().splitlines():
        print(line.rstrip())


def _print(console: Console, report: EnvCheckReport) -> None:
    console.print(_checks_table(report))
    wrong = sum(not result.is_expected for result in report.probes)
    if wrong:
        shown = min(wrong, _PROBES_SHOWN)
        console.print(Text(f"\nWrong probes ({shown} of {wrong})", style="bold"))
        console.print(_wrong_probes_table(report))
    console.print(Text("\nMean reward of the best content-free policy", style="bold"))
    console.print(_scores_table(report))
    if report.missed:
        phases = ", ".join(f"{name} ({counted(count, 'rollout')})" for name, count in report.missed.items())
        console.print(Text(f"\nNot run within {report.budget:g} s (--budget): {phases}", style="yellow"))
    count = {status: count_with_status(report.checks, status) for status in _STYLES}
    labels: Mapping[CheckStatus, str] = {
        "error": "errors",
        "warning": "warnings",
        "note": "notes",
        "pass": "passed",
        "not run": "not run",
    }
    counts = ", ".join(f"{count[status]} {labels[status]}" for status in _STYLES)
    worst: CheckStatus = next((status for status in _STYLES if count[status]), "not run")
    console.print(
        Text(
            f"\n{report.environment}: {counts}, in {report.seconds:.0f} s; up to "
            f"{counted(report.sample, 'task')} per family and split (--sample)",
            style=_STYLES[worst],
        )
    )


def _checks_table(report: EnvCheckReport) -> Table:
    table = _table("check", "result", "")
    for check in report.checks:
        table.add_row(Text(check.name), Text(check.status, style=_STYLES[check.status]), Text(check.detail))
    return table


def _wrong_probes_table(report: EnvCheckReport) -> Table:
    wrong = [result for result in report.probes if not result.is_expected]
    table = _table("probe", "task", "expected", "got")
    for result in wrong[:_PROBES_SHOWN]:
        got = f"{result.reward:g}" if result.reward is not None else f"error: {result.error}"
        table.add_row(Text(result.probe.name), Text(result.probe.task.id), result.expected, Text(got))
    return table


def _scores_table(report: EnvCheckReport) -> Table:
    """Return the table, family by split, of the best content-free mean reward and chance."""
    best = report.best_scores()
    table = _table("family", *(title for split in report.sizes for title in (split, "chance")))
    for family in sorted({family for _, family in report.chance}):
        cells = []
        for split in report.sizes:
            group, score = (split, family), best.get((family, split))
            style = _STYLES["warning"] if group in report.above_chance else ""
            cells.append(Text("-") if score is None else Text(f"{score.mean:.3f}", style=style))
            cells.append(Text(f"{report.chance[group].share:.3f}" if group in report.chance else "-"))
        table.add_row(Text(family), *cells)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
