"""Find the answers of tasks under a key that Buckeye does not know, by the rewards of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from buckeye.envs.base import Task
from buckeye.evaluation.checks.samples import SplitSample
from buckeye.evaluation.checks.scripted_runner import ScriptedRunner
from buckeye.evaluation.checks.task_text import (
    USUAL_FORMATS,
    accepted_answers,
    answer_formats,
    apply_format,
    prompt_of,
)

_TASKS = 4
_MAX_KEYS = 10
_MAX_LENGTH = 200
_REWARDED = 0.5

Key = tuple[str, ...]
"""Path of a value in the data of a task."""


async def with_found_answers(runner: ScriptedRunner, samples: Sequence[SplitSample]) -> list[SplitSample]:
    """Return the samples, with the values of a key as answers if each is rewarded for its own task only.

    The samples are unchanged if a task has known answers.
    """
    tasks = list(samples[0].scanned[:_TASKS])
    if len(tasks) < 2 or any(accepted_answers(task) for sample in samples for task in sample.scanned):
        return list(samples)
    forms = dict.fromkeys([None, *answer_formats(map(prompt_of, tasks)), *USUAL_FORMATS])
    for key in _candidates(tasks):
        for form in forms:
            if await _is_answer(runner, tasks, key, form):
                return [_with_answers(sample, key) for sample in samples]
    return list(samples)


def _candidates(tasks: Sequence[Task]) -> list[Key]:
    """Return the keys of short values that differ between tasks."""
    keys = [key for key, _ in _leaves(tasks[0].data)]
    values = {key: [value_at(task, key) for task in tasks] for key in keys}
    return [
        key
        for key, found in values.items()
        if all(_is_short(value) for value in found) and len(set(map(str, found))) > 1
    ][:_MAX_KEYS]


def _leaves(data: Mapping[str, Any], path: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _is_short(value: Any) -> bool:
    is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
    return is_scalar and 0 < len(str(value)) <= _MAX_LENGTH


def value_at(task: Task, key: Key) -> Any:
    """Return the value at a key in the data of a task, or None."""
    value: Any = task.data
    for name in key:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


async def _is_answer(runner: ScriptedRunner, tasks: Sequence[Task], key: Key, form: str | None) -> bool:
    """Return True if the value of each task is rewarded, and no other value of a different task is."""
    values = [str(value_at(task, key)) for task in tasks]
    first, *others = await runner.run_all([(tasks[0], apply_format(form, value)) for value in values])
    if first is None or not first.reward >= _REWARDED:
        return False
    wrong = [played for value, played in zip(values[1:], others, strict=True) if value != values[0]]
    if not all(played is not None and played.reward < _REWARDED for played in wrong):
        return False
    rest = [(task, apply_format(form, value)) for task, value in zip(tasks[1:], values[1:], strict=True)]
    return all(played is not None and played.reward >= _REWARDED for played in await runner.run_all(rest))


def _with_answers(sample: SplitSample, key: Key) -> SplitSample:
    def answered(task: Task) -> Task:
        value = value_at(task, key)
        return replace(task, data={**task.data, "answer": value}) if _is_short(value) else task

    families = {family: [answered(task) for task in tasks] for family, tasks in sample.families.items()}
    return replace(sample, scanned=[answered(task) for task in sample.scanned], families=families)
