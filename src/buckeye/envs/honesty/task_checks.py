"""Checks that read tasks and play nothing. Each returns one line of a report."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from buckeye.envs.base import START, Task
from buckeye.envs.honesty.fingerprint import Fingerprint, first_difference
from buckeye.envs.honesty.result import CheckResult, failed, not_run, passed, shortened
from buckeye.envs.honesty.samples import SplitSample
from buckeye.envs.honesty.texts import accepted_answers, prompt_of
from buckeye.errors import RunError


def check_ids(samples: Sequence[SplitSample]) -> CheckResult:
    """An id names one task, everywhere; and a held-out split holds it once."""
    name, known = "task ids", dict[str, tuple[str, Task]]()
    for sample in samples:
        here: set[str] = set()
        for task in sample.scanned:
            if not task.id:
                return failed(name, f"{sample.name} has a task without an id: {shortened(prompt_of(task))}")
            split, first = known.setdefault(task.id, (sample.name, task))
            if _content(first) != _content(task):
                return failed(name, f"{task.id} names two tasks: one in {split}, another in {sample.name}")
            if task.id in here and not sample.is_train:
                return failed(name, f"{task.id} is in {sample.name} twice")
            here.add(task.id)
    repeated = sum(len(s.scanned) - len({task.id for task in s.scanned}) for s in samples)
    drawn = f"; train repeats {repeated:,} of its tasks" if repeated else ""
    return passed(name, f"{len(known):,} ids, each of one task{drawn}")


def check_same_tasks(
    here: Fingerprint, again: Sequence[Callable[[], Fingerprint]], where: str
) -> CheckResult:
    """Whether each of `again` finds the tasks that were found here."""
    name = f"same tasks {where}"
    for made in again:
        try:
            difference = first_difference(here, made())
        except RunError as error:
            return failed(name, str(error))
        if difference is not None:
            return failed(name, difference)
    return passed(name, f"{sum(len(tasks) - 1 for tasks in here.values()):,} tasks compared")


def check_answers_hidden(samples: Sequence[SplitSample]) -> CheckResult:
    """No accepted answer stands in its prompt as a word or words of its own.

    An answer of one character, or a number, is not looked for: such things stand in prompts anyway. A policy
    that repeats the prompt is played all the same.
    """
    name, shown, looked = "no answer in the prompt", [], 0
    for sample in samples:
        for task in sample.scanned:
            answers = [answer for answer in accepted_answers(task) if _can_leak(answer)]
            looked += bool(answers)
            text = _folded(prompt_of(task))
            shown += [(sample.name, task, answer) for answer in answers if holds(text, _folded(answer))]
    if shown:
        split, task, answer = shown[0]
        tasks = len({(split, task.id) for split, task, _ in shown})
        return failed(name, f"{tasks:,} show it, as {task.id} of {split}: {answer!r} in {_quoted(task)}")
    if not looked:
        return not_run(name, "no task has `accept` or `answer` in its data")
    return passed(name, f"{looked:,} tasks read")


def check_apart(samples: Sequence[SplitSample]) -> CheckResult:
    """Train shares no prompt and no id with a held-out split."""
    name = "train and held-out apart"
    train = [sample for sample in samples if sample.is_train]
    held_out = [sample for sample in samples if not sample.is_train]
    if not train or not held_out:
        return not_run(name, f"there is only {', '.join(sample.name for sample in samples)}")
    ids = {task.id for task in train[0].scanned}
    prompts = {_prompt_key(task) for task in train[0].scanned}
    for sample in held_out:
        twice = [task for task in sample.scanned if task.id in ids or _prompt_key(task) in prompts]
        if twice:
            what = "id" if twice[0].id in ids else "prompt"
            return failed(
                name,
                f"{len(twice):,} of {len(sample.scanned):,} tasks of {sample.name} are in train too, as "
                f"{twice[0].id} (same {what}): {_quoted(twice[0])}",
            )
    extents = ", ".join(f"{sample.name} {sample.extent}" for sample in samples)
    return passed(name, f"no id or prompt in common ({extents})")


def holds(text: str, answer: str) -> bool:
    """Whether `answer` stands in `text` with no letter or digit of a longer word beside it."""
    return any(
        not (start and _in_word(text[start - 1]) and _in_word(answer[0]))
        and not (end < len(text) and _in_word(text[end]) and _in_word(answer[-1]))
        for start, end in _places(text, answer)
    )


def _places(text: str, answer: str) -> Iterator[tuple[int, int]]:
    start = text.find(answer)
    while start >= 0:
        yield start, start + len(answer)
        start = text.find(answer, start + 1)


def _in_word(char: str) -> bool:
    return char.isalnum() or unicodedata.category(char).startswith("M")


def _can_leak(answer: str) -> bool:
    bare = answer.strip()
    return len(bare) > 1 and not all(char.isdigit() or char in ".,+-%/ " for char in bare)


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _content(task: Task) -> tuple[str, frozenset[str]]:
    return _prompt_key(task), frozenset(accepted_answers(task))


def _prompt_key(task: Task) -> str:
    shown = [*(dict(message) for message in task.messages), task.data.get(START)]
    return json.dumps(shown, sort_keys=True, default=repr)


def _quoted(task: Task) -> str:
    return repr(shortened(prompt_of(task)))
