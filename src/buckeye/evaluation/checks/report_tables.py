"""Format the report of `buckeye env check` as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from buckeye.base.columns import align_columns, counted
from buckeye.base.json_lines import printable
from buckeye.evaluation.checks.rollout_checks import ProbeResult

if TYPE_CHECKING:
    from buckeye.evaluation.env_check import EnvCheckReport

_PROBES_SHOWN = 10


def report_text(report: EnvCheckReport) -> str:
    """Return a table of checks, wrong probes, content-free scores, and a summary line."""
    return printable("\n".join(_parts(report)))


def _parts(report: EnvCheckReport) -> Iterator[str]:
    checks = [(check.name, check.status, check.line) for check in report.checks]
    yield align_columns([("check", "result", ""), *checks])
    wrong = [result for result in report.probes if not result.is_expected]
    if wrong:
        rows = [_probe_row(result) for result in wrong[:_PROBES_SHOWN]]
        yield f"\nWrong probes ({len(rows)} of {len(wrong)})"
        yield align_columns([("probe", "task", "expected", "got"), *rows])
    yield "\nMean reward of the best content-free policy"
    yield align_columns(_score_rows(report))
    if report.missed:
        phases = ", ".join(f"{name} ({counted(count, 'rollout')})" for name, count in report.missed.items())
        yield f"\nNot run within {report.options.budget:g} s (--budget): {phases}"
    counts = ", ".join(counted(report.counts[status], status) for status in ("error", "warning", "note"))
    yield (
        f"\n{report.environment}: {counts}, {report.counts['pass']} passed, "
        f"{report.counts['not run']} not run, in {report.seconds:.0f} s; up to "
        f"{counted(report.options.sample, 'task')} per family and split (--sample)"
    )


def _probe_row(result: ProbeResult) -> Sequence[str]:
    got = f"{result.reward:g}" if result.reward is not None else f"error: {result.error}"
    return result.probe.name, result.probe.task.id, result.expected, got


def _score_rows(report: EnvCheckReport) -> list[list[str]]:
    """Return a row per family: for each split, the best content-free mean reward, and chance."""
    best = report.best_scores()
    rows = [["family", *(title for split in report.sizes for title in (split, "chance"))]]
    for family in sorted({family for _, family in report.chance}):
        rows.append([family])
        for split in report.sizes:
            score, chance = best.get((family, split)), report.chance.get((split, family))
            rows[-1].append("-" if score is None else f"{score.mean:.3f}")
            rows[-1].append("-" if chance is None else f"{chance:.3f}")
    return rows
