"""Measure agreement and biases of a judge: a model that grades replies, or that compares two of them.

An environment with a judge names the judge's components in its member `judged`. If the judge compares, the
environment has a method `compare(task, first, second)`. It returns the verdict from 0 (the second reply is
better) to 1 (the first reply is better).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from buckeye.base.columns import counted
from buckeye.envs.base import Outcome, Probe, Task
from buckeye.errors import THIRD_PARTY_ERRORS
from buckeye.evaluation.checks.result import CheckResult, out_of_time_result, shortened
from buckeye.evaluation.checks.samples import SplitSample, groups_of
from buckeye.evaluation.checks.scripted_runner import ROLLOUT_SECONDS, ScriptedRunner
from buckeye.evaluation.checks.task_text import accepted_answers, apply_format, question_of
from buckeye.monitor.intervals import mean_over_tasks, paired_difference

PADDING = (
    8 * "I read this with care, thought about it for some time, and now write my reply as well as I can.\n"
)
"""Text without content, which padded replies begin with."""

_TASKS = 20

Pair = tuple[Task, str, str]
"""Task and two replies to it: its answer, and that of another task. Questions replace unknown answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeBias:
    """Bias of a judge with its 95 % interval over tasks, measured with `calls` gradings or comparisons.

    The bias of length is the increase of a component if the reply is padded. The bias of position is the
    share of pairs whose verdict changes if the two replies are swapped. The agreement is the share of
    labelled replies whose component is in the range of the label.
    """

    kind: Literal["length", "position", "agreement"]
    component: str | None
    value: float
    low: float
    high: float
    calls: int

    def __str__(self) -> str:
        changes = {
            "length": f"{self.component} changes by {self.value:+.3f}",
            "position": f"{self.value:.0%} of the verdicts change",
            "agreement": f"{self.component} agrees with {self.value:.0%} of {self.calls} labels",
        }
        return f"{changes[self.kind]} [{self.low:.3f}, {self.high:.3f}]"


async def measure_judge(
    runner: ScriptedRunner,
    samples: Sequence[SplitSample],
    form: str | None,
    limit: float,
    labels: Sequence[Probe] = (),
) -> tuple[list[CheckResult], list[JudgeBias]]:
    """Return the checks and the biases of the environment's judge; nothing for an environment without one.

    A bias is a warning if its interval is above `limit`. `labels` are probes with a component.
    """
    judged: Sequence[str] = getattr(runner.environment, "judged", ())
    compare: Callable[[Task, str, str], Awaitable[float]] | None
    compare = getattr(runner.environment, "compare", None)
    pairs = _pairs(samples, form)
    checks, biases = list[CheckResult](), list[JudgeBias]()
    if labels:
        results = await runner.run_all([(label.task, label.reply) for label in labels])
        for component in dict.fromkeys(str(label.component) for label in labels):
            outcomes = [
                (label, result.outcome)
                for label, result in zip(labels, results, strict=True)
                if result is not None and label.component == component
            ]
            checks.append(_agreement(component, outcomes, biases))
    if judged:
        name = "length bias of the judge"
        found = await _length_biases(runner, judged, pairs)
        checks.append(_result(name, found, limit))
        biases += found
    if compare is not None:
        name = "position bias of the judge"
        try:
            found = await _position_bias(runner, compare, pairs)
            checks.append(_result(name, found, limit))
            biases += found
        except THIRD_PARTY_ERRORS as error:  # third-party code
            reason = shortened(f"{type(error).__name__}: {error}", 200)
            checks.append(CheckResult(name, "error", f"`compare` failed: {reason}"))
    return checks, biases


def _agreement(
    component: str, outcomes: Sequence[tuple[Probe, Outcome]], measured: list[JudgeBias]
) -> CheckResult:
    """Return the check of the labels of one component, and add the agreement to `measured`.

    A judge that agrees no more often than one grade for all replies is a warning.
    """
    name = "agreement of the judge"
    if not outcomes:
        return out_of_time_result(name)
    graded = [(label, o.components[component]) for label, o in outcomes if component in o.components]
    failed = [outcome for _, outcome in outcomes if component not in outcome.components]
    if failed:
        reason = shortened(failed[0].error or "no grade", 200)
        return CheckResult(name, "error", f"{len(failed)} of {len(outcomes)} replies have no grade: {reason}")
    agrees = [float(label.low <= grade <= label.high) for label, grade in graded]
    share = mean_over_tasks(agrees, [label.task.id for label, _ in graded])
    constant = max(
        sum(label.low <= grade <= label.high for label, _ in graded) / len(graded)
        for grade in {label.low for label, _ in graded} | {label.high for label, _ in graded}
    )
    found = JudgeBias(
        kind="agreement", component=component, value=share.value, low=share.low, high=share.high,
        calls=len(graded),
    )  # fmt: skip
    measured.append(found)
    detail = f"{found}; one grade for all would agree with {constant:.0%}"
    return CheckResult(name, "warning" if share.low <= constant else "pass", detail)


def _pairs(samples: Sequence[SplitSample], form: str | None) -> list[Pair]:
    tasks = [task for _, _, tasks in groups_of(samples) for task in tasks[:_TASKS]][:_TASKS]
    replies = [apply_format(form, next(iter(accepted_answers(task)), question_of(task))) for task in tasks]
    return [(task, replies[i], replies[i - 1]) for i, task in enumerate(tasks)]


async def _length_biases(
    runner: ScriptedRunner, judged: Sequence[str], pairs: Sequence[Pair]
) -> list[JudgeBias]:
    """Grade each reply with and without padding, and return the biases of the judged components."""
    replies = [(task, reply) for task, *both in pairs for reply in both]
    results = await runner.run_all([(task, pad + reply) for task, reply in replies for pad in ("", PADDING)])
    graded = [
        (plain.task.id, plain.outcome.components, padded.outcome.components)
        for plain, padded in zip(results[::2], results[1::2], strict=True)
        if plain is not None and padded is not None
    ]
    biases = []
    for name in judged:
        scores = [
            (task, one[name], other[name]) for task, one, other in graded if name in one and name in other
        ]
        if scores:
            tasks, before, after = zip(*scores, strict=True)
            scale = max(1.0, *map(abs, (*before, *after)))
            share = paired_difference([b / scale for b in before], [a / scale for a in after], tasks)
            value, low, high = (scale * part for part in (share.value, share.low, share.high))
            calls = 2 * len(scores)
            biases.append(
                JudgeBias(kind="length", component=name, value=value, low=low, high=high, calls=calls)
            )
    return biases


async def _position_bias(
    runner: ScriptedRunner, compare: Callable[[Task, str, str], Awaitable[float]], pairs: Sequence[Pair]
) -> list[JudgeBias]:
    """Compare each pair in both orders, and return the share of changed verdicts."""
    changed = list[float]()
    for task, one, other in pairs:
        if one == other or not runner.has_time:
            continue
        async with asyncio.timeout(ROLLOUT_SECONDS):
            first, second = await compare(task, one, other), 1.0 - await compare(task, other, one)
        if not 0.0 <= min(first, second) <= max(first, second) <= 1.0:
            raise ValueError(f"a verdict is not from 0 to 1: {first:g} and {1.0 - second:g} for {task.id}")
        changed.append(float(_better(first) != _better(second)))
    if not changed:
        return []
    share = mean_over_tasks(changed, range(len(changed)))
    calls = 2 * len(changed)
    return [
        JudgeBias(
            kind="position", component=None, value=share.value, low=share.low, high=share.high, calls=calls
        )
    ]


def _better(verdict: float) -> int:
    """Return 1 if the first reply is better, -1 if the second is, and 0 for a tie."""
    return (verdict > 0.5) - (verdict < 0.5)


def _result(name: str, biases: Sequence[JudgeBias], limit: float) -> CheckResult:
    if not biases:
        return out_of_time_result(name)
    detail = f"{'; '.join(map(str, biases))}; {counted(sum(bias.calls for bias in biases), 'call')}"
    if any(bias.low > limit for bias in biases):
        return CheckResult(name, "warning", detail)
    return CheckResult(name, "note" if any(bias.value > limit for bias in biases) else "pass", detail)
