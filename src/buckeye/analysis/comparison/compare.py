"""Compare two runs, A and B, and state in one sentence which run is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from buckeye import runs
from buckeye.analysis.comparison.curves import (
    MeanInterval,
    Point,
    StepsComparison,
    compare_steps,
    points_of,
)
from buckeye.analysis.comparison.differences import (
    RunDifference,
    TaskCounts,
    compare_tasks,
    different_machines,
    different_settings,
    different_versions,
)
from buckeye.analysis.comparison.evaluations import EvaluationComparison, compare_evaluations
from buckeye.launch.changed_settings import SettingChange, settings_history

VerdictOutcome = Literal["better", "worse", "not told apart", "not comparable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonVerdict:
    """Verdict on run B compared with run A.

    `difference` is the reward of B minus that of A. `by` names the compared data.
    """

    outcome: VerdictOutcome
    difference: MeanInterval | None
    by: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Full comparison of two runs."""

    a: Path
    b: Path
    verdict: ComparisonVerdict
    settings: Sequence[RunDifference]
    changes: Mapping[str, Sequence[SettingChange]]
    """Settings of run `a` and of run `b` that changed when the run was resumed."""
    versions: Sequence[RunDifference]
    machines: Sequence[RunDifference]
    tasks: Sequence[TaskCounts]
    evaluations: Sequence[EvaluationComparison]
    parts: Sequence[StepsComparison]
    unreadable: Sequence[str]


def compare(a: str | Path, b: str | Path) -> RunComparison:
    """Compare two runs in any state. Raise `UsageError` if `a` or `b` is not a run."""
    first, second = runs.open(a), runs.open(b)
    points_a, points_b = points_of(first), points_of(second)
    parts = compare_steps(points_a, points_b)
    evaluations = compare_evaluations(first, second)
    return RunComparison(
        a=first.path,
        b=second.path,
        verdict=_verdict(evaluations, parts, missing=_missing(points_a, points_b)),
        settings=different_settings(first, second),
        changes={"a": settings_history(first.path), "b": settings_history(second.path)},
        versions=different_versions(first, second),
        machines=different_machines(first, second),
        tasks=compare_tasks(first, second),
        evaluations=evaluations,
        parts=parts,
        unreadable=[*first.unreadable, *second.unreadable],
    )


def _missing(a: Sequence[Point], b: Sequence[Point]) -> str:
    without = [name for name, points in (("A", a), ("B", b)) if not points]
    return f"{' and '.join(without)} recorded no reward" if without else "the runs have no step in common"


def _verdict(
    evaluations: Sequence[EvaluationComparison], parts: Sequence[StepsComparison], *, missing: str
) -> ComparisonVerdict:
    """Return the verdict from the newest common evaluation of trained weights.

    If the runs have no such evaluation, use the last quarter of their common steps.
    """
    trained = [evaluation for evaluation in evaluations if evaluation.version > 0]
    if trained:
        last = trained[-1]
        by = f"the evaluation of version {last.version}, {last.difference.n} tasks"
        return judge(last.a, last.b, last.difference, by)
    if not parts:
        sentence = f"B and A cannot be compared: {missing}."
        return ComparisonVerdict(outcome="not comparable", difference=None, by="", sentence=sentence)
    part = parts[-1]
    how = "task by task" if part.paired else "not paired by task"
    return judge(part.a, part.b, part.difference, f"{step_range_text(part)}, {how}")


def judge(
    a: MeanInterval | None, b: MeanInterval | None, difference: MeanInterval | None, by: str
) -> ComparisonVerdict:
    """Return the verdict on the means of A and B, and their difference. `by` names the compared data."""
    outcome: VerdictOutcome = "not told apart"
    if a is None or b is None or difference is None or difference.low is None or difference.high is None:
        sentence = f"B and A cannot be compared: too little is recorded ({by})."
        return ComparisonVerdict(outcome=outcome, difference=difference, by=by, sentence=sentence)
    verdict = "B and A do not differ significantly"
    if difference.low > 0.0 or difference.high < 0.0:
        outcome = "better" if difference.low > 0.0 else "worse"
        verdict = f"B is {outcome} than A"
    seen = f"reward {b.value:.4g} against {a.value:.4g}, {shown(difference, sign=True)} ({by})"
    return ComparisonVerdict(outcome=outcome, difference=difference, by=by, sentence=f"{verdict}: {seen}.")


def step_range_text(part: StepsComparison) -> str:
    """Return the steps of a part as text, such as `steps 9 to 11`."""
    return f"steps {part.first} to {part.last}" if part.first != part.last else f"step {part.first}"


def shown(mean: MeanInterval | None, *, sign: bool = False) -> str:
    """Return a mean with its interval as text; a dash for None."""
    if mean is None:
        return "-"
    form = "{:+.3f}" if sign else "{:.3f}"
    value = form.format(mean.value)
    if mean.low is None or mean.high is None:
        return value
    return f"{value} [{form.format(mean.low)}, {form.format(mean.high)}]"
