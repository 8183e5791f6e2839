"""Checks that read tasks, without rollouts. Each check returns a `CheckResult`."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from buckeye.base.columns import counted
from buckeye.envs.base import START, Task
from buckeye.evaluation.checks.chance import is_above, option_count
from buckeye.evaluation.checks.fingerprint import Fingerprint, first_difference
from buckeye.evaluation.checks.result import NO_ANSWERS, CheckResult, out_of_time_result, shortened
from buckeye.evaluation.checks.samples import SplitSample, family_of
from buckeye.evaluation.checks.task_text import (
    accepted_answers,
    normalize,
    prompt_contains,
    prompt_of,
    with_decoded,
)

_NOTE_RATIO = 2.0
"""Maximum ratio for the status "pass". Above this ratio, the status is "note".

The ratio is the share of prompts that contain their own answer, divided by the share of prompts that contain
another task's answer.
"""

_OTHER_ANSWERS = 10
"""Number of other tasks' answers to search for in each prompt."""


def check_ids(samples: Sequence[SplitSample]) -> CheckResult:
    """Check that tasks with the same id are equal, also in different splits.

    A train split may repeat a task. A held-out split must not.
    """
    name, known = "task ids", dict[str, tuple[str, Task]]()
    for sample in samples:
        ids: set[str] = set()
        for task in sample.scanned:
            if not task.id:
                return CheckResult(
                    name, "error", f"{sample.name} has a task without an id: {shortened(prompt_of(task))}"
                )
            split, first = known.setdefault(task.id, (sample.name, task))
            if _content(first) != _content(task):
                return CheckResult(
                    name, "error", f"id {task.id} is used for two tasks: one in {split}, one in {sample.name}"
                )
            if task.id in ids and not sample.is_train:
                return CheckResult(name, "error", f"{task.id} occurs twice in {sample.name}")
            ids.add(task.id)
    repeated = sum(len(s.scanned) - len({task.id for task in s.scanned}) for s in samples)
    repetitions = f"; {repeated:,} repeated in train" if repeated else ""
    return CheckResult(name, "pass", f"{counted(len(known), 'unique id')}{repetitions}")


def check_tasks_repeatable(
    reference: Fingerprint, repeated: Sequence[Fingerprint | str | None], where: str
) -> CheckResult:
    """Check that each fingerprint in `repeated` equals `reference`.

    A text in place of a fingerprint is the reason why none could be computed. None: the time was over.
    """
    name = f"same tasks {where}"
    for fingerprint in repeated:
        if fingerprint is None:
            return out_of_time_result(name)
        difference = fingerprint if isinstance(fingerprint, str) else first_difference(reference, fingerprint)
        if difference is not None:
            return CheckResult(name, "error", difference)
    return CheckResult(
        name, "pass", f"{counted(sum(len(tasks) - 1 for tasks in reference.values()), 'task')} compared"
    )


def check_answers_hidden(samples: Sequence[SplitSample], limit: float, seed: int) -> CheckResult:
    """Check that accepted answers occur in their own prompts no more often than other tasks' answers do.

    They may be in base64 or hexadecimal.
    An answer that is one of the options in the prompt is not a leak.
    """
    name = "no answer in the prompt"
    groups = {(s.name, family): _answered(s, family) for s in samples for family in s.families}
    groups = {group: tasks for group, tasks in groups.items() if tasks}
    if not groups:
        return CheckResult(name, "not run", NO_ANSWERS)
    leaks = {group: _leak(tasks, limit, seed, len(groups)) for group, tasks in groups.items()}
    read = sum(map(len, groups.values()))
    (split, family), worst = max(leaks.items(), key=lambda item: (item[1].is_significant, item[1].excess))
    own = len(worst.shown) / len(groups[split, family])
    if not worst.is_significant and own <= _NOTE_RATIO * worst.others:
        often = (
            f"; {own:.0%} contain their answer, {worst.others:.0%} that of another task"
            if worst.shown
            else ""
        )
        return CheckResult(name, "pass", f"{counted(read, 'task')} read{often}")
    return CheckResult(
        name,
        "warning" if worst.is_significant else "note",
        f"{len(worst.shown):,} of {len(groups[split, family]):,} prompts of {family} in {split} contain "
        f"their answer, {worst.others:.0%} that of another task; for example {worst.shown[0].id}: "
        f"{_answer_in(worst.shown[0])!r} in "
        f"{_quoted(worst.shown[0])}",
    )


@dataclass(frozen=True, slots=True)
class _Leak:
    """Tasks of a family whose prompts contain their answer.

    `others` is the share of prompts that contain the answer of another task. `excess` is the share of `shown`
    minus `others`. `is_significant` is True if `excess` is significantly above the limit.
    """

    shown: Sequence[Task]
    others: float
    excess: float
    is_significant: bool


def _answered(sample: SplitSample, family: str) -> list[Task]:
    return [task for task in sample.scanned if family_of(task) == family and accepted_answers(task)]


def _leak(tasks: Sequence[Task], limit: float, seed: int, comparisons: int) -> _Leak:
    rng = random.Random(f"{seed}/leaks")  # noqa: S311  not for security
    shown = [task for task in tasks if _shows(task, task)]
    if not shown:
        return _Leak((), 0.0, 0.0, False)
    pairs = [(task, tasks[rng.randrange(len(tasks))]) for task in tasks for _ in range(_OTHER_ANSWERS)]
    others_shown = [_shows(task, other) for task, other in pairs if _differ(task, other)]
    others = statistics.fmean(others_shown) if others_shown else 0.0
    own = {task.id for task in shown}
    share = len(shown) / len(tasks)
    is_significant = is_above([[float(task.id in own) for task in tasks]], others + limit, comparisons)
    return _Leak(shown, others, share - others, is_significant)


def _shows(task: Task, answered: Task) -> bool:
    """Return True if the prompt of `task` shows an accepted answer of `answered`, but not as an option."""
    answers = accepted_answers(answered)
    prompt = with_decoded(prompt_of(task))
    if not any(prompt_contains(prompt, answer) for answer in answers):
        return False
    return any(_is_json_value(prompt, answer) for answer in answers) or not option_count(task, answers)


def _is_json_value(prompt: str, answer: str) -> bool:
    """Return True if a JSON object in the prompt has the answer under a key, so that it is not an option."""
    value = re.escape(json.dumps(answer, ensure_ascii=False).strip('"'))
    return re.search(rf'"\s*:\s*(?:"{value}"|{value})\s*[,}}]', prompt) is not None


def _differ(task: Task, other: Task) -> bool:
    return not set(accepted_answers(task)) & set(accepted_answers(other))


def _answer_in(task: Task) -> str:
    prompt = with_decoded(prompt_of(task))
    return next(answer for answer in accepted_answers(task) if prompt_contains(prompt, answer))


def check_splits_disjoint(samples: Sequence[SplitSample]) -> CheckResult:
    """Check that train shares no prompt and no id with a held-out split."""
    name = "train and held-out are disjoint"
    train = [sample for sample in samples if sample.is_train]
    held_out = [sample for sample in samples if not sample.is_train]
    if not train or not held_out:
        return CheckResult(
            name, "not run", f"the only split is {', '.join(sample.name for sample in samples)}"
        )
    ids = {task.id for task in train[0].scanned}
    prompts = {_prompt_key(task) for task in train[0].scanned}
    for sample in held_out:
        shared = [task for task in sample.scanned if task.id in ids or _prompt_key(task) in prompts]
        if shared:
            key = "id" if shared[0].id in ids else "prompt"
            return CheckResult(
                name,
                "error",
                f"{len(shared):,} of {len(sample.scanned):,} tasks of {sample.name} are also in train; for "
                f"example {shared[0].id} (same {key}): {_quoted(shared[0])}",
            )
    reworded = {_reworded_key(task) for task in train[0].scanned}
    for sample in held_out:
        answered = [task for task in sample.scanned if accepted_answers(task)]
        shared = [task for task in answered if _reworded_key(task) in reworded]
        if shared:
            return CheckResult(
                name,
                "warning",
                f"{len(shared):,} of {len(sample.scanned):,} tasks of {sample.name} differ from a task of "
                f"train only in spaces or case; for example {shared[0].id}: {_quoted(shared[0])}",
            )
    extents = ", ".join(f"{sample.name} {sample.extent}" for sample in samples)
    return CheckResult(name, "pass", f"no id or prompt in common ({extents})")


def _content(task: Task) -> tuple[str, frozenset[str]]:
    return _prompt_key(task), frozenset(accepted_answers(task))


def _prompt_key(task: Task) -> str:
    shown = [*(dict(message) for message in task.messages), task.data.get(START)]
    return json.dumps(shown, sort_keys=True, default=repr)


def _reworded_key(task: Task) -> tuple[str, str, frozenset[str]]:
    words = " ".join(normalize(prompt_of(task)).split())
    return words, repr(task.data.get(START)), frozenset(accepted_answers(task))


def _quoted(task: Task) -> str:
    return repr(shortened(prompt_of(task)))
