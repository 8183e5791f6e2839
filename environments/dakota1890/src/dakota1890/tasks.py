"""The task sequences: questions in words, with all that grading them takes.

A train sequence is long and lazy: item i is a pure function of the options and i. The evaluation is fixed:
every held-out question on the record, or a fixed sample of them where a family has too many.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, overload

from dakota1890.draws import Draws
from dakota1890.errors import ArgumentError
from dakota1890.families import FAMILIES
from dakota1890.questions import JSON, Family, Question
from dakota1890.splits import hash_fraction, side_of

DEPTHS = (1, 2, 3, 4)
EVAL_PER_SIDE = 120
"""The most questions of one family on one held-out axis."""

_EVAL_SEED = 1890
_EVAL_DRAWS = 20_000
_DRAWS_FOR_DEPTHS = 2_000
_MOST_REJECTED = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One task. `data` can be written as JSON; it holds the accepted answers and everything in `Question`
    that describes the task, and its `split`: train or the axis it is held out on.
    """

    id: str
    prompt: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """What a task sequence is drawn from. `invented_fraction`: the share of invented words in the families
    that have them.
    """

    families: tuple[str, ...] = tuple(FAMILIES)
    depths: tuple[int, ...] = DEPTHS
    hint: bool = True
    invented_fraction: float = 0.0
    seed: int = 0


class TrainTasks(Sequence[Item]):
    """`count` train tasks; item i is made when asked for and depends on (options, i) alone.

    Raises ArgumentError if no family has a train question of these depths.
    """

    def __init__(self, options: TaskOptions, count: int) -> None:
        self._options = options
        self._count = count
        self._families = trained_families(options)
        if not self._families:
            raise ArgumentError(
                f"dakota1890: there are no train questions of depth {_listed(options.depths)} in "
                f"{_listed(options.families)}. The depths that can be trained are: "
                f"{_depths_of_families(options.families)}."
            )

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"train task {index} of {self._count}")
        return self._make(index % self._count)

    def __iter__(self) -> Iterator[Item]:
        return map(self._make, range(self._count))

    def _make(self, index: int) -> Item:
        options, draws = self._options, Draws(self._options.seed, index)
        family = FAMILIES[draws.pick(self._families)]
        recorded = _recorded_train(family.name, options.depths, options.hint)
        if family.draw is not None:
            return _first_of_train(family.draw, draws, options)
        if family.invent is not None and (
            not recorded or draws.below(1_000_000) < options.invented_fraction * 1_000_000
        ):
            return _first_of_train(family.invent, draws, options)
        return draws.pick(recorded)


def trained_families(options: TaskOptions) -> list[str]:
    """The families with train questions of these depths; the exceptions have none of any."""
    return [family for family in options.families if train_depths(family) & set(options.depths)]


def train_cells(options: TaskOptions, count: int) -> dict[str, TrainTasks]:
    """The train tasks by family and depth, each cell a sequence of `count`: `conjugate/1`, `order/4` ..."""
    return {
        f"{family}/{depth}": TrainTasks(
            TaskOptions(
                families=(family,),
                depths=(depth,),
                hint=options.hint,
                invented_fraction=options.invented_fraction,
                seed=options.seed,
            ),
            count,
        )
        for family in options.families
        for depth in sorted(train_depths(family) & set(options.depths))
    }


@lru_cache(maxsize=64)
def train_depths(family: str) -> frozenset[int]:
    """The depths at which a family has train questions."""
    source = FAMILIES[family]
    if source.exceptions:
        return frozenset()
    if source.recorded is not None:
        return frozenset(item.data["depth"] for item in _recorded_train(family, DEPTHS, True))
    drawn = (_drawn(source, index) for index in range(_DRAWS_FOR_DEPTHS))
    return frozenset(question.depth for question in drawn if side_of(question) == "train")


@lru_cache(maxsize=64)
def eval_tasks(families: tuple[str, ...], depths: tuple[int, ...], hint: bool) -> tuple[Item, ...]:
    """The held-out tasks of the families, shuffled by task id."""
    tasks = [
        render(question, side, hint)
        for family in families
        for side, questions in _held_out(family).items()
        for question in questions
        if question.depth in depths
    ]
    return tuple(sorted(tasks, key=lambda task: hash_fraction(task.id)))


@lru_cache(maxsize=1)
def held_out_forms() -> frozenset[str]:
    """Every answer that a held-out task of any family accepts."""
    return frozenset(
        form for task in eval_tasks(tuple(FAMILIES), DEPTHS, True) for form in task.data["accept"]
    )


def render(question: Question, side: str, hint: bool) -> Item:
    """The question in words. Its id depends on what is asked and accepted, not on the hint."""
    rule = f" Rule: {question.rule}." if hint and question.rule else ""
    prompt = f"{question.ask}{rule} Put only the {question.answer} in <answer></answer>."
    digest = hashlib.sha256("\n".join((question.family, question.ask, *question.accept)).encode())
    data = {
        "family": question.family,
        "split": side,
        "rule_ids": tuple(dict.fromkeys(question.rule_ids)),
        "lemma_ids": question.lemma_ids,
        "cells": question.cells,
        "facts": question.facts,
        "depth": question.depth,
        "answer": question.answer,
        "accept": _written(question),
        "keys": question.keys,
        "prompt_forms": question.prompt_forms,
        "floor_forms": question.floor_forms,
        "marks_matter": question.marks_matter,
        "invented": question.invented,
    }
    return Item(id=f"{question.family}-{digest.hexdigest()[:16]}", prompt=prompt, data=data)


def _written(question: Question) -> tuple[str, ...]:
    """The accepted answers as they are written between the tags."""
    if question.answer != JSON:
        return question.accept
    answers = []
    for form in question.accept:
        values = [value.replace("_", " ") for value in form.split(" ")]
        answers.append(json.dumps(dict(zip(question.keys, values, strict=True)), ensure_ascii=False))
    return tuple(answers)


def _first_of_train(make: Callable[[Draws], Question], draws: Draws, options: TaskOptions) -> Item:
    for _ in range(_MOST_REJECTED):
        question = make(draws)
        if question.depth in options.depths and side_of(question) == "train":
            return render(question, "train", options.hint)
    raise AssertionError(f"no train question of {make.__module__} in {_MOST_REJECTED} draws")


@lru_cache(maxsize=256)
def _recorded_train(family: str, depths: tuple[int, ...], hint: bool) -> tuple[Item, ...]:
    source = FAMILIES[family]
    if source.recorded is None or source.exceptions:
        return ()
    return tuple(
        render(question, "train", hint)
        for question in source.recorded()
        if question.depth in depths and side_of(question) == "train"
    )


@lru_cache(maxsize=64)
def _held_out(family: str) -> Mapping[str, Sequence[Question]]:
    """Axis -> the questions evaluated on it."""
    source = FAMILIES[family]
    if source.recorded is not None:
        known: Iterable[Question] = source.recorded()
    else:
        known = (_drawn(source, index) for index in _held_out_draws()[family])
    return {side: questions for side, (_, questions) in _sampled(source, enumerate(known)).items()}


@lru_cache(maxsize=1)
def _held_out_draws() -> Mapping[str, Sequence[int]]:
    """Family -> which of its draws are evaluated, as `find_held_out_draws` has found them."""
    text = (resources.files("dakota1890") / "data" / "held_out_draws.json").read_text("utf-8")
    found: dict[str, list[int]] = json.loads(text)
    return found


def find_held_out_draws() -> dict[str, list[int]]:
    """Family without recorded questions -> those of its first 20,000 draws that are evaluated, which takes
    seconds and never changes: `data/held_out_draws.json` has the result as JSON."""
    return {
        name: sorted(
            index
            for indices, _ in _sampled(
                family, ((index, _drawn(family, index)) for index in range(_EVAL_DRAWS))
            ).values()
            for index in indices
        )
        for name, family in FAMILIES.items()
        if family.recorded is None
    }


def _sampled(
    family: Family, numbered: Iterable[tuple[int, Question]]
) -> dict[str, tuple[list[int], list[Question]]]:
    """Axis -> the numbers and the questions that are evaluated on it."""
    by_side: dict[str, dict[str, tuple[int, Question]]] = defaultdict(dict)
    for number, question in numbered:
        side = side_of(question, exception=family.exceptions)
        if side != "train":
            by_side[side].setdefault(question.ask, (number, question))
    chosen = {}
    for side, asked in by_side.items():
        first = sorted(asked.values(), key=lambda one: hash_fraction(f"eval:{one[1].ask}"))[:EVAL_PER_SIDE]
        chosen[side] = [number for number, _ in first], [question for _, question in first]
    return chosen


def _drawn(family: Family, index: int) -> Question:
    assert family.draw is not None
    return family.draw(Draws(_EVAL_SEED, index))


def _depths_of_families(families: Sequence[str]) -> str:
    return "; ".join(f"{name}: {_listed(sorted(train_depths(name))) or 'none'}" for name in families)


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))
