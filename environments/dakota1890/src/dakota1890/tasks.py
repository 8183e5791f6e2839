"""The task sequences: every fact the record licenses as a question with its accepted answers.

A train sequence is long and lazy: item i is a pure function of the seed and i. The evaluation holds every
fact about held-out lemmas and a fixed sample of held-out numbers, in a fixed shuffled order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, overload

from buckeye.envs.base import Task
from dakota1890 import prompts
from dakota1890.corpus import Entry, Noun, Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.invented import invented_noun, invented_verb
from dakota1890.morphology import PERSONS, UNITS, conjugate, numeral, possess, with_particle
from dakota1890.orthography import canonical
from dakota1890.splits import gloss_parts, hash_fraction, held_out_lemma, held_out_number

FAMILIES = ("conjugate", "possess", "numerals", "dictionary")
EVAL_NUMBERS = 200

_PARTICLE_RULES = {"kta": "VERB-20", "šni": "VERB-23"}
_PARTS_OF_SPEECH = {
    "n.": "noun",
    "v.a.": "verb",
    "v.n.": "verb",
    "adj.": "adjective",
    "adv.": "adverb",
    "prep.": "postposition",
    "name": "name",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """What a task sequence is drawn from. `invented_fraction`: the share of invented words in the two
    families that have them (conjugate, possess); 0 outside training.
    """

    families: tuple[str, ...] = FAMILIES
    hint: bool = True
    invented_fraction: float = 0.0
    seed: int = 0


class TrainTasks(Sequence[Task]):
    """`count` train tasks; item i is made when asked for and depends on (options, i) alone."""

    def __init__(self, options: TaskOptions, count: int) -> None:
        self._options = options
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"train task {index} of {self._count}")
        return self._make(index % self._count)

    def __iter__(self) -> Iterator[Task]:
        return map(self._make, range(self._count))

    def _make(self, index: int) -> Task:
        options, draws = self._options, Draws(self._options.seed, index)
        family = draws.pick(options.families)
        if family == "numerals":
            return _numeral_task(_train_number(draws), options.hint, "train")
        if family != "dictionary" and draws.below(1_000_000) < options.invented_fraction * 1_000_000:
            return _invented_task(family, draws, options.hint)
        return draws.pick(lemma_tasks(family, "train", options.hint))


@lru_cache(maxsize=32)
def eval_tasks(families: tuple[str, ...], hint: bool) -> tuple[Task, ...]:
    """Every held-out fact of the families and the sample of held-out numbers, shuffled by task id."""
    tasks: list[Task] = []
    for family in families:
        if family == "numerals":
            tasks += [_numeral_task(number, hint, "eval") for number in eval_numbers()]
        else:
            tasks += lemma_tasks(family, "eval", hint)
    return tuple(sorted(tasks, key=lambda task: hash_fraction(task.id)))


@lru_cache(maxsize=1)
def eval_numbers() -> tuple[int, ...]:
    """The held-out numbers asked for: all below 100, and as many of three as of four digits."""
    held = [number for number in range(1, 10_000) if held_out_number(number)]
    small = [number for number in held if number < 100]
    half = (EVAL_NUMBERS - len(small)) // 2
    hundreds = _sample([number for number in held if 100 <= number < 1_000], half)
    thousands = _sample([number for number in held if number >= 1_000], EVAL_NUMBERS - len(small) - half)
    return (*small, *hundreds, *thousands)


def _sample(numbers: Sequence[int], count: int) -> list[int]:
    return sorted(numbers, key=lambda number: hash_fraction(f"eval:{number}"))[:count]


@lru_cache(maxsize=32)
def lemma_tasks(family: str, split: str, hint: bool) -> tuple[Task, ...]:
    """Every task of a family about the recorded lemmas of a split."""
    corpus, held = load_corpus(), split == "eval"
    tasks: list[Task] = []
    if family == "conjugate":
        for verb in corpus.verbs:
            if held_out_lemma(verb.lemma) == held:
                tasks += [_verb_task(verb, *cell, hint, split) for cell in verb_cells(verb)]
    elif family == "possess":
        for noun in corpus.nouns:
            if held_out_lemma(noun.lemma) == held:
                tasks += [_noun_task(noun, person, hint, split) for person in noun.persons]
    else:
        for entry in dictionary_entries():
            if held_out_lemma(entry.form) == held:
                tasks.append(_dictionary_task(entry, split))
    # Words with the same gloss accept each other and are one question.
    return tuple({task.messages[0]["content"]: task for task in reversed(tasks)}.values())[::-1]


def verb_cells(verb: Verb) -> list[tuple[str, str | None]]:
    """The (person, particle) cells of `verb` the record licenses; the bare third person is the lemma."""
    cells: list[tuple[str, str | None]] = [(person, None) for person in verb.persons]
    for person in ("3sg", *verb.persons):
        if person.endswith("pl") or verb.final != "unknown":
            cells += [(person, "kta"), (person, "šni")]
    return cells


@lru_cache(maxsize=1)
def dictionary_entries() -> tuple[Entry, ...]:
    """Single words with a printed English gloss that do not show the word and that no rule derives."""
    derived = {
        form for verb in load_corpus().verbs for p in PERSONS for form in conjugate(verb, p) if p != "3sg"
    }
    derived |= {
        form for noun in load_corpus().nouns for person in noun.persons for form in possess(noun, person)
    }
    return tuple(
        entry
        for entry in load_corpus().entries
        if entry.status in ("sound", "corrected")
        and entry.pos in _PARTS_OF_SPEECH
        and " " not in entry.form
        and entry.gloss.isascii()
        and canonical(entry.form) not in derived
        and canonical(entry.form) not in canonical(entry.gloss).replace("(", " ").split()
    )


def _verb_task(verb: Verb, person: str, particle: str | None, hint: bool, split: str) -> Task:
    accept: Sequence[str] = conjugate(verb, person)
    floor = [verb.lemma]
    if particle:
        final = "keeps" if person.endswith("pl") else verb.final
        accept = [form for bare_form in accept for form in with_particle(bare_form, final, particle)]
        floor.append(f"{verb.lemma} {particle}")
    rules = (*verb.rules, *_number_rules(person), *([_PARTICLE_RULES[particle]] if particle else []))
    prompt = prompts.conjugate_prompt(verb, person, particle, hint=hint)
    shown = {"prompt_forms": (verb.lemma,), "floor_forms": tuple(floor)}
    return _task("conjugate", split, prompt, accept, rules, verb.lemma, 2 if particle else 1, shown)


def _number_rules(person: str) -> tuple[str, ...]:
    return ("VERB-12",) if person in ("2pl", "3pl") else ("VERB-13",) if person in ("12", "1pl") else ()


def _noun_task(noun: Noun, person: str, hint: bool, split: str) -> Task:
    prompt = prompts.possess_prompt(noun, person, hint=hint)
    shown = {"prompt_forms": (noun.lemma,), "floor_forms": (noun.lemma,)}
    return _task("possess", split, prompt, possess(noun, person), noun.rules, noun.lemma, 1, shown)


def _invented_task(family: str, draws: Draws, hint: bool) -> Task:
    if family == "conjugate":
        verb = invented_verb(draws)
        task = _verb_task(verb, *draws.pick(verb_cells(verb)), hint, "train")
    else:
        noun = invented_noun(draws)
        task = _noun_task(noun, draws.pick(noun.persons), hint, "train")
    return Task(id=task.id, messages=task.messages, data={**task.data, "invented": True})


def _train_number(draws: Draws) -> int:
    """One digit once in ten; two, three and four digits equally often; never a held-out number."""
    while True:
        digits = (draws.below(10) + 5) // 3
        low = 10 ** (digits - 1)
        number = low + draws.below(9 * low)
        if not held_out_number(number):
            return number


def _numeral_task(number: int, hint: bool, split: str) -> Task:
    prompt = prompts.numeral_prompt(number, hint=hint)
    depth = sum(digit != "0" for digit in str(number))
    rules = ["NUM-01"] if number <= 10 else []
    rules += ["NUM-02"] if 11 <= number % 100 <= 19 else ["NUM-03", "NUM-04"] if number % 100 > 19 else []
    rules += ["NUM-05"] if number >= 100 else []
    # A reply with the right skeleton and every count wrong is worth nothing: only counts earn shaping.
    shown = {"prompt_forms": (), "floor_forms": (_skeleton(number),)}
    return _task("numerals", split, prompt, numeral(number), rules, str(number), depth, shown)


def _skeleton(number: int) -> str:
    """`number` in words with every count replaced by another one."""
    other = dict(zip(UNITS, (*UNITS[4:], *UNITS[:4]), strict=True))
    return " ".join(other.get(word, word) for word in numeral(number)[0].split())


def _dictionary_task(entry: Entry, split: str) -> Task:
    prompt = prompts.dictionary_prompt(entry.gloss, _PARTS_OF_SPEECH[entry.pos])
    accept = [canonical(entry.form), *_synonyms(entry)]
    shown: dict[str, Any] = {"prompt_forms": (), "floor_forms": ()}
    return _task("dictionary", split, prompt, accept, (), canonical(entry.form), 1, shown)


def _synonyms(entry: Entry) -> list[str]:
    """Other recorded words that share one of the senses of `entry`, and its dialect spellings."""
    parts, corpus = gloss_parts(entry), load_corpus()
    shared = [
        canonical(other.form)
        for other in corpus.entries
        if other.status != "excluded" and other.pos != "affix" and parts & gloss_parts(other)
    ]
    return shared + [spelling for spelling, kind in corpus.variants.get(entry.form, ()) if kind == "dialect"]


def _task(
    family: str,
    split: str,
    prompt: str,
    accept: Sequence[str],
    rules: Sequence[str],
    lemma: str,
    depth: int,
    shown: Mapping[str, Any],
) -> Task:
    """A task whose id is a hash of what is asked and what is accepted."""
    accept = tuple(dict.fromkeys(accept))
    digest = hashlib.sha256("\n".join((family, prompt, *accept)).encode()).hexdigest()[:16]
    data = {
        "family": family,
        "split": split,
        "rule_ids": tuple(dict.fromkeys(rules)),
        "lemma_ids": (lemma,),
        "depth": depth,
        "accept": accept,
        **shown,
    }
    return Task(id=f"{family}-{digest}", messages=({"role": "user", "content": prompt},), data=data)
