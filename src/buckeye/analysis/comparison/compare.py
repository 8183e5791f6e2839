"""Comparison of two runs, with a one-sentence verdict on the second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from buckeye import runs
from buckeye.analysis.comparison.curves import (
    Evaluated,
    Mean,
    Part,
    Point,
    compared,
    compared_evaluations,
    points_of,
)
from buckeye.analysis.comparison.differences import (
    Difference,
    Tasks,
    compared_tasks,
    different_machines,
    different_settings,
    different_versions,
)

Outcome = Literal["better", "worse", "not told apart", "not comparable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Verdict on B against A: `difference` is B minus A, and `by` names the compared data."""

    outcome: Outcome
    difference: Mean | None
    by: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Full comparison of two runs."""

    a: Path
    b: Path
    verdict: Verdict
    settings: Sequence[Difference]
    versions: Sequence[Difference]
    machines: Sequence[Difference]
    tasks: Sequence[Tasks]
    evaluations: Sequence[Evaluated]
    parts: Sequence[Part]
    unreadable: Sequence[str]


def compare(a: str | Path, b: str | Path) -> Comparison:
    """Compare two runs in any state. Raise `UsageError` if one is not a run."""
    first, second = runs.open(a), runs.open(b)
    points_a, points_b = points_of(first), points_of(second)
    parts = compared(points_a, points_b)
    evaluations = compared_evaluations(first, second)
    return Comparison(
        a=first.path,
        b=second.path,
        verdict=_verdict(evaluations, parts, missing=_missing(points_a, points_b)),
        settings=different_settings(first, second),
        versions=different_versions(first, second),
        machines=different_machines(first, second),
        tasks=compared_tasks(first, second),
        evaluations=evaluations,
        parts=parts,
        unreadable=[*first.unreadable, *second.unreadable],
    )


def _missing(a: Sequence[Point], b: Sequence[Point]) -> str:
    without = [name for name, points in (("A", a), ("B", b)) if not points]
    return f"{' and '.join(without)} recorded no reward" if without else "they have no step in common"


def _verdict(evaluations: Sequence[Evaluated], parts: Sequence[Part], *, missing: str) -> Verdict:
    """Return the verdict from the newest common evaluation of trained weights.

    Without one, it is from the last quarter of the common steps.
    """
    trained = [one for one in evaluations if one.version > 0]
    if trained:
        last = trained[-1]
        by = f"the evaluation of version {last.version}, {last.difference.n} tasks"
        return _judged(last.a, last.b, last.difference, by)
    if not parts:
        return Verdict(
            outcome="not comparable",
            difference=None,
            by="",
            sentence=f"B and A cannot be compared: {missing}.",
        )
    part = parts[-1]
    how = "task by task" if part.paired else "not paired by task"
    return _judged(part.a, part.b, part.difference, f"{extent(part)}, {how}")


def _judged(a: Mean | None, b: Mean | None, difference: Mean | None, by: str) -> Verdict:
    if a is None or b is None or difference is None or difference.low is None or difference.high is None:
        return Verdict(
            outcome="not told apart",
            difference=difference,
            by=by,
            sentence=f"B and A cannot be told apart: too little is recorded ({by}).",
        )
    seen = f"reward {b.value:.4g} against {a.value:.4g}, {shown(difference, sign=True)} ({by})"
    if difference.low > 0.0:
        return Verdict(
            outcome="better", difference=difference, by=by, sentence=f"B is better than A: {seen}."
        )
    if difference.high < 0.0:
        return Verdict(outcome="worse", difference=difference, by=by, sentence=f"B is worse than A: {seen}.")
    return Verdict(
        outcome="not told apart",
        difference=difference,
        by=by,
        sentence=f"B and A are not told apart: {seen}.",
    )


def extent(part: Part) -> str:
    """Return `steps 9 to 11`, numbered as in the log."""
    return f"steps {part.first} to {part.last}" if part.first != part.last else f"step {part.first}"


def shown(mean: Mean | None, *, sign: bool = False) -> str:
    """Return a mean with its interval as text; a dash for None."""
    if mean is None:
        return "-"
    form = "{:+.3f}" if sign else "{:.3f}"
    value = form.format(mean.value)
    if mean.low is None or mean.high is None:
        return value
    return f"{value} [{form.format(mean.low)}, {form.format(mean.high)}]"
