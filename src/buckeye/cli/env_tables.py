"""What `buckeye env check` prints: tables in a terminal, aligned text elsewhere."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from buckeye.envs.check import Report

_STYLES = {"pass": "green", "fail": "bold red", "not run": "yellow"}
_PROBES_SHOWN = 10
_PAPER_WIDTH = 10_000  # outside a terminal no line is broken


def print_report(report: Report, *, limit: float) -> None:
    """The checks, the probes that went wrong, the content-free scores, and a closing line, on stdout."""
    if sys.stdout.isatty():
        _print(Console(), report, limit)
        return
    paper = io.StringIO()
    _print(Console(file=paper, width=_PAPER_WIDTH), report, limit)
    for line in paper.getvalue().splitlines():
        print(line.rstrip())


def _print(console: Console, report: Report, limit: float) -> None:
    console.print(_checks(report))
    wrong = sum(not result.ok for result in report.probes)
    if wrong:
        shown = min(wrong, _PROBES_SHOWN)
        console.print(Text(f"\nWrong probes ({shown} of {wrong})", style="bold"))
        console.print(_wrong_probes(report))
    console.print(Text("\nMean reward of the best policy without content", style="bold"))
    console.print(_scores(report, limit))
    count = {status: sum(check.status == status for check in report.checks) for status in _STYLES}
    console.print(
        Text(
            f"\n{report.environment}: {count['pass']} passed, {count['fail']} failed, "
            f"{count['not run']} not run, in {report.seconds:.0f} s; at most {report.sample} tasks of "
            "a family and split played (--sample)",
            style=_STYLES["pass" if report.passed else "fail"],
        )
    )


def _checks(report: Report) -> Table:
    table = _table("check", "result", "")
    for check in report.checks:
        table.add_row(Text(check.name), Text(check.status, style=_STYLES[check.status]), Text(check.detail))
    return table


def _wrong_probes(report: Report) -> Table:
    wrong = [result for result in report.probes if not result.ok]
    table = _table("probe", "task", "expected", "got")
    for result in wrong[:_PROBES_SHOWN]:
        got = f"{result.got:g}" if result.got is not None else f"error: {result.error}"
        table.add_row(Text(result.probe.name), Text(result.probe.task.id), result.expected, Text(got))
    return table


def _scores(report: Report, limit: float) -> Table:
    """Family x split: the mean reward of the content-free policy that does best there."""
    best = report.best_scores()
    table = _table("family", *report.sizes)
    for family in sorted({family for family, _ in best}):
        cells = [best.get((family, split)) for split in report.sizes]
        table.add_row(
            Text(family),
            *(
                Text("-") if s is None else Text(f"{s.mean:.3f}", style="" if s.mean <= limit else "bold red")
                for s in cells
            ),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
