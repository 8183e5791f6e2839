"""Check that a reward function gives right answers a higher reward than wrong ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from buckeye.base.columns import counted
from buckeye.envs.base import Task
from buckeye.evaluation.checks.result import CheckResult, out_of_time_result
from buckeye.evaluation.checks.samples import SplitSample, groups_of
from buckeye.evaluation.checks.scripted_runner import TOLERANCE, ScriptedRunner
from buckeye.evaluation.checks.task_text import ANSWER, USUAL_FORMATS, accepted_answers, apply_format

_TASKS = 20


@dataclass(frozen=True, slots=True)
class _AnsweredTask:
    """Rewards of the replies to one task: by form, of its answer and of another task's answer; and of ""."""

    name: str
    answer: str
    right: Mapping[str | None, float]
    wrong: Mapping[str | None, float]
    empty: float


async def check_answer_order(
    name: str, runner: ScriptedRunner, samples: Sequence[SplitSample], formats: Sequence[str | None]
) -> CheckResult:
    """Compare the rewards of accepted answers, of answers of other tasks, and of empty replies.

    Each answer is tried bare, in the formats that the prompts show, and in the usual formats. Unlike a check
    with a fixed minimum, this check assumes no range of the rewards. `name` is the name of the check.
    """
    forms = list(dict.fromkeys([*formats, *USUAL_FORMATS]))
    tested = await _run_tasks(runner, samples, forms)
    if not tested:
        errored = CheckResult(name, "not run", "every rollout errored")
        return errored if runner.errored else out_of_time_result(name)
    right = {form: math.fsum(task.right[form] for task in tested) / len(tested) for form in forms}
    wrong = {form: math.fsum(task.wrong[form] for task in tested) / len(tested) for form in forms}
    empty = math.fsum(task.empty for task in tested) / len(tested)
    best = max(forms, key=lambda form: right[form] - wrong[form])
    worst = min(forms, key=lambda form: right[form] - wrong[form])
    answers = counted(len(tested), "right answer")
    if right[best] > wrong[best] + TOLERANCE:
        if empty > max(right.values()) + TOLERANCE:
            detail = f"empty replies have mean reward {empty:.3f}, {answers} {right[best]:.3f}"
            return _sign_error(name, detail)
        return _rewarded_result(name, tested, f"right {right[best]:.3f}, wrong {wrong[best]:.3f}")
    if right[worst] < wrong[worst] - TOLERANCE:
        detail = f"{answers} have mean reward {right[worst]:.3f}, wrong answers {wrong[worst]:.3f}"
        return _sign_error(name, f"{detail} ({_describe_form(worst)})")
    first = tested[0]
    shown = f"for example {first.answer!r} for {first.name} ({', '.join(map(_describe_form, forms))})"
    if all(abs(value) <= TOLERANCE for task in tested for value in task.right.values()):
        detail = f"{answers} and all other replies have reward 0; {shown}"
        return CheckResult(name, "error", detail, code="BK-REWARD-ZERO")
    detail = f"{answers} have mean reward {right[best]:.3f}, and so do wrong answers; {shown}"
    return CheckResult(name, "error", detail, code="BK-REWARD-CONSTANT")


def _sign_error(name: str, detail: str) -> CheckResult:
    return CheckResult(name, "error", f"{detail}; the sign may be wrong", code="BK-REWARD-SIGN")


def _rewarded_result(name: str, tested: Sequence[_AnsweredTask], means: str) -> CheckResult:
    """Return a warning if the answers of some tasks have no higher reward than an empty reply."""
    failing = [task for task in tested if max(task.right.values()) <= task.empty + TOLERANCE]
    if not failing:
        detail = f"mean reward of {counted(len(tested), 'answer')}: {means}"
        return CheckResult(name, "pass", detail)
    first = failing[0]
    detail = (
        f"{len(failing):,} of {len(tested):,} right answers have no higher reward than an empty reply; for "
        f"example {first.answer!r} for {first.name}: {max(first.right.values()):g}"
    )
    return CheckResult(name, "warning", detail, code="BK-REWARD-ZERO")


async def _run_tasks(
    runner: ScriptedRunner, samples: Sequence[SplitSample], forms: Sequence[str | None]
) -> list[_AnsweredTask]:
    """Return the rewards of the tasks whose rollouts all ended in time and without an error."""
    tasks: list[tuple[str, Task, str, str]] = []
    for split, _, sampled in groups_of(samples):
        answered = [task for task in sampled if accepted_answers(task)][:_TASKS]
        for index, task in enumerate(answered):
            accepted = set(accepted_answers(task))
            others = [*answered[index + 1 :], *answered[:index]]
            tasks.append((split, task, accepted_answers(task)[0], _other_answer(others, accepted)))
    replies = []
    for _, task, answer, other in tasks:
        replies += [(task, apply_format(form, text)) for text in (answer, other) for form in forms]
        replies.append((task, ""))
    results = await runner.run_all(replies)
    tested, size = [], 2 * len(forms) + 1
    for number, (split, task, answer, _) in enumerate(tasks):
        rewards = [played.reward for played in results[number * size : (number + 1) * size] if played]
        if len(rewards) == size and all(map(math.isfinite, rewards)):
            right = dict(zip(forms, rewards, strict=False))
            wrong = dict(zip(forms, rewards[len(forms) :], strict=False))
            tested.append(_AnsweredTask(f"{task.id} of {split}", answer, right, wrong, rewards[-1]))
    return tested


def _other_answer(others: Sequence[Task], accepted: Set[str]) -> str:
    """Return an answer of another task that is wrong for this task, or "" if all tasks have one answer."""
    answers = (answer for task in others for answer in accepted_answers(task)[:1])
    return next((answer for answer in answers if answer not in accepted), "")


def _describe_form(form: str | None) -> str:
    return "bare" if form is None else " ".join(form.replace(ANSWER, "…").split())
