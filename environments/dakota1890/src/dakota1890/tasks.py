"""Task sequences: rendered questions, with all data for grading.

A train sequence is long and lazy: item i is a pure function of the options and i. The evaluation is fixed:
every held-out question on the record, or a fixed sample of them if a family has too many.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from dakota1890.draws import Draws
from dakota1890.errors import ArgumentError
from dakota1890.families import FAMILIES
from dakota1890.lazy import LazySequence
from dakota1890.questions import Family, Question
from dakota1890.splits import hash_fraction, side_of

DEPTHS = (1, 2, 3, 4)
EVAL_PER_SIDE = 120
"""Maximum number of questions of one family on one held-out axis."""

_EVAL_SEED = 1890
_DRAWS_FOR_DEPTHS = 2_000
_MAX_REJECTED = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One task, with `data` for JSON.

    It holds the accepted answers, the fields of `Question` that describe the task, and its `split`: train or
    the held-out axis.
    """

    id: str
    prompt: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """Options of a task sequence.

    `invented_fraction` is the share of invented words in the families that have them.
    """

    families: tuple[str, ...] = tuple(FAMILIES)
    depths: tuple[int, ...] = DEPTHS
    hint: bool = True
    invented_fraction: float = 0.0
    seed: int = 0


class TrainTasks(LazySequence[Item]):
    """Sequence of `count` train tasks; item i depends only on (options, i).

    Raises ArgumentError if no family has a train question of these depths.
    """

    def __init__(self, options: TaskOptions, count: int) -> None:
        super().__init__(count, self._draw)
        self._options = options
        self._families = trained_families(options)
        if not self._families:
            raise ArgumentError(
                f"dakota1890: no train questions of depth {_join(options.depths)} in "
                f"{_join(options.families)}",
                f"depths with train questions: {_depths_of_families(options.families)}",
            )

    def _draw(self, index: int) -> Item:
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
    """Return the families with train questions of these depths; the exceptions never have any."""
    return [family for family in options.families if train_depths(family) & set(options.depths)]


@lru_cache(maxsize=64)
def train_depths(family: str) -> frozenset[int]:
    """Return the depths at which a family has train questions."""
    source = FAMILIES[family]
    if source.exceptions:
        return frozenset()
    if source.recorded is not None:
        return frozenset(item.data["depth"] for item in _recorded_train(family, DEPTHS, True))
    drawn = (draw_question(source, index) for index in range(_DRAWS_FOR_DEPTHS))
    return frozenset(question.depth for question in drawn if side_of(question) == "train")


@lru_cache(maxsize=64)
def eval_tasks(families: tuple[str, ...], depths: tuple[int, ...], hint: bool) -> tuple[Item, ...]:
    """Return the held-out tasks of the families, shuffled by task id."""
    tasks = [
        render(question, side, hint)
        for family in families
        for side, questions in _held_out(family).items()
        for question in questions
        if question.depth in depths
    ]
    return tuple(sorted(tasks, key=lambda task: hash_fraction(task.id)))


def render(question: Question, side: str, hint: bool) -> Item:
    """Render the question as a task. Its id depends on question and accepted answers, not on the hint."""
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
        "accept": question.accept,
        "prompt_forms": question.prompt_forms,
        "floor_forms": question.floor_forms,
        "invented": question.invented,
    }
    return Item(id=f"{question.family}-{digest.hexdigest()[:16]}", prompt=prompt, data=data)


def _first_of_train(make: Callable[[Draws], Question], draws: Draws, options: TaskOptions) -> Item:
    for _ in range(_MAX_REJECTED):
        question = make(draws)
        if question.depth in options.depths and side_of(question) == "train":
            return render(question, "train", options.hint)
    raise AssertionError(f"no train question of {make.__module__} in {_MAX_REJECTED} draws")


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
    """Return the evaluated questions by axis."""
    source = FAMILIES[family]
    if source.recorded is not None:
        return held_out_sample(source, source.recorded())
    return held_out_sample(source, (draw_question(source, index) for index in _held_out_draws()[family]))


@lru_cache(maxsize=1)
def _held_out_draws() -> Mapping[str, Sequence[int]]:
    """Return the indices of evaluated draws, by family without recorded questions.

    Finding them takes seconds.
    """
    text = (resources.files("dakota1890") / "data" / "held_out_draws.json").read_text("utf-8")
    indices: dict[str, list[int]] = json.loads(text)
    return indices


def held_out_sample(family: Family, questions: Iterable[Question]) -> dict[str, list[Question]]:
    """Return those of `questions` that are evaluated, by axis."""
    by_side: dict[str, dict[str, Question]] = defaultdict(dict)
    for question in questions:
        side = side_of(question, exception=family.exceptions)
        if side != "train":
            by_side[side].setdefault(question.ask, question)
    return {
        side: sorted(questions_by_text.values(), key=lambda question: hash_fraction(f"eval:{question.ask}"))[
            :EVAL_PER_SIDE
        ]
        for side, questions_by_text in by_side.items()
    }


def draw_question(family: Family, index: int) -> Question:
    """Return the question that a family without recorded ones draws at `index`."""
    assert family.draw is not None
    return family.draw(Draws(_EVAL_SEED, index))


def _depths_of_families(families: Sequence[str]) -> str:
    return "; ".join(f"{name}: {_join(sorted(train_depths(name))) or 'none'}" for name in families)


def _join(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))
