"""Put the lost diacritics back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dakota1890.corpus import load_corpus
from dakota1890.families import conjugate as verbs
from dakota1890.families import possess as owners
from dakota1890.families.dictionary import dictionary_entries, part_of_speech, word_for
from dakota1890.orthography import bare, canonical
from dakota1890.questions import WORD, Family, Question, unique

_LOST = {"ŋ": "n", "š": "s", "ž": "z", "ć": "c", "ġ": "g", "ḣ": "h", "ḳ": "k", "ṭ": "t", "ṗ": "p"}
_RULE = (
    "without marks n after a vowel may stand for ŋ, s for š, z for ž, c for ć, g for ġ, h for ḣ, k for ḳ, "
    "t for ṭ and p for ṗ"
)


@dataclass(frozen=True, slots=True)
class _Base:
    """A form with its marks, its meaning in words, and the question that asks for it."""

    form: str
    meaning: str
    asked: Question


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    same: dict[tuple[str, str], set[str]] = defaultdict(set)
    for base in _bases():
        same[base.meaning, bare(base.form)].add(base.form)
    # Where two forms of one meaning differ by their marks alone, the damaged one is not asked about.
    sure = [base for base in _bases() if len(same[base.meaning, bare(base.form)]) == 1]
    asked = {question.ask: question for base in sure for question in _damaged(base)}
    return tuple(asked.values())


REPAIR = Family(name="repair", recorded=_recorded)


@lru_cache(maxsize=1)
def _bases() -> Sequence[_Base]:
    return [base for base in (*_words(), *_verb_forms(), *_noun_forms()) if " " not in base.form]


def _words() -> Iterator[_Base]:
    for entry in dictionary_entries():
        yield _Base(canonical(entry.form), f"{entry.gloss} ({part_of_speech(entry)})", word_for(entry))


def _verb_forms() -> Iterator[_Base]:
    for verb in load_corpus().verbs:
        for person in verb.persons:
            asked = verbs.question(verb, person)
            for form in asked.accept:
                yield _Base(form, f"{verb.gloss} (form: {verbs.PERSON_NAMES[person]})", asked)


def _noun_forms() -> Iterator[_Base]:
    for noun in load_corpus().nouns:
        for person in noun.persons if owners.EXCEPTION not in noun.rules else ():
            asked = owners.question(noun, person)
            for form in asked.accept:
                yield _Base(form, f"{owners.OWNER_NAMES[person]} {noun.gloss}", asked)


def _damaged(base: _Base) -> Iterator[Question]:
    """All marks lost, and one kind alone; not ć alone, since no word has a plain c."""
    kinds = tuple(mark for mark in _LOST if mark in base.form)
    if kinds not in ((), ("ć",)):
        yield _question(base, kinds)
    if len(kinds) > 1:
        yield _question(base, tuple(mark for mark in kinds if mark != "ć")[-1:])


def _question(base: _Base, lost: tuple[str, ...]) -> Question:
    shown = base.form
    for mark in lost:
        shown = shown.replace(mark, _LOST[mark])
    return replace(
        base.asked,
        family="repair",
        cells=unique([*base.asked.cells, *(f"{mark} lost|{base.asked.family}" for mark in lost)]),
        rule_ids=unique([*base.asked.rule_ids, *(("PHON-01",) if "ŋ" in lost else ())]),
        depth=min(len(lost), 3),
        ask=f'"{shown}" is a Dakota form that has lost marks. Meaning: {base.meaning}. Spell it right.',
        rule=_RULE,
        answer=WORD,
        accept=(base.form,),
        prompt_forms=(shown,),
        floor_forms=(shown,),
        marks_matter=True,
    )
