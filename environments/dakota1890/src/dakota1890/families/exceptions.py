"""Forms that the rules get wrong: only ever evaluated, and nowhere else asked for in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from dakota1890.corpus import Irregular, load_corpus
from dakota1890.families.conjugate import PARTICLE_WORDS, PERSON_NAMES
from dakota1890.families.numerals import fact as number_fact
from dakota1890.families.particles import PROHIBITION
from dakota1890.families.possess import OWNER_NAMES
from dakota1890.morphology import numeral
from dakota1890.orthography import canonical
from dakota1890.questions import FORM, NUMBER, WORDS, Family, Question

_WORDS_FOR = {"verb": "verb", "noun": "noun", "kin": "kin term", "number": "number"}
_NAMES = {"his or her": ("Ćaske", "Hepaŋ", "Winona", "Hapaŋ"), "his": ("Hepi", "Ćataŋ", "Hake")}
"""Children's names; those of sons where only a man has such a relative."""

_NINETEENS = (
    *(19, 119, 219, 319, 419, 519, 619, 719, 819, 919),
    *(1_019, 2_019, 4_019, 6_019, 8_019, 1_219, 2_519, 3_119, 5_719, 7_319, 9_619),
)
_READ = (19, 219, 619, 1_019, 3_019, 7_019, 1_119, 4_819)
_NINETEEN = "ten and nine is not wikćemna and napćiŋwaŋka but the other nine, with uŋma for other"


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    questions = [_write(number) for number in _NINETEENS] + [_read(number) for number in _READ]
    for irregular in load_corpus().irregulars:
        questions += _about(irregular)
    return questions


EXCEPTIONS = Family(name="exceptions", recorded=_recorded, exceptions=True)


def _about(irregular: Irregular) -> Iterator[Question]:
    question = _form(irregular)
    yield question
    if irregular.particles:
        yield from (_followed(question, particle) for particle in PARTICLE_WORDS)
    if irregular.kind == "verb" and irregular.meaning.startswith("2"):
        yield _forbidden(question)
    if irregular.kind == "kin" and irregular.meaning in _NAMES:
        yield from (_named(question, irregular, name) for name in _NAMES[irregular.meaning])


def _form(irregular: Irregular) -> Question:
    word = irregular.word
    alone = irregular.kind == "think"
    names = OWNER_NAMES if irregular.kind == "noun" else PERSON_NAMES
    meaning = names.get(irregular.meaning, irregular.meaning)
    shown = () if alone else (word,)
    return Question(
        family="exceptions",
        facts=(f"{word}/exception/{irregular.meaning}",),
        cells=(f"exception|{irregular.kind}",),
        lemma_ids=(word,),
        rule_ids=irregular.rules,
        depth=1,
        ask=(
            f'Give the Dakota verb for "{meaning}", which has no other person.'
            if alone
            else f'Dakota {_WORDS_FOR[irregular.kind]} "{word}" ({irregular.gloss}). Form: {meaning}.'
        ),
        rule=irregular.rule,
        answer=FORM,
        accept=irregular.forms,
        prompt_forms=shown,
        # The regular form is the mistake this family looks for: being near it earns nothing.
        floor_forms=(*shown, *irregular.regular),
    )


def _followed(question: Question, particle: str) -> Question:
    """The form with kta or šni after it, which changes nothing at its end."""
    meaning, rule_id = PARTICLE_WORDS[particle]
    return replace(
        question,
        facts=(*question.facts, f"{question.facts[0]}/{particle}"),
        rule_ids=(*question.rule_ids, rule_id),
        depth=2,
        ask=f"{question.ask[:-1]}, {meaning}.",
        rule=f"{question.rule}; {particle} follows for the {meaning}",
        accept=tuple(f"{form} {particle}" for form in question.accept),
        floor_forms=tuple(f"{form} {particle}" for form in question.floor_forms) + question.floor_forms,
    )


def _forbidden(question: Question) -> Question:
    """The form with the words of a prohibition around it."""
    frame = PROHIBITION
    return replace(
        question,
        facts=(*question.facts, f"{question.facts[0]}/{frame.name}"),
        rule_ids=(*question.rule_ids, frame.rule_id),
        depth=2,
        ask=f"{question.ask[:-1]}, {frame.meaning}.",
        rule=f"{question.rule}; {frame.rule}",
        accept=tuple(map(frame.around, question.accept)),
        floor_forms=tuple(map(frame.around, question.floor_forms)) + question.floor_forms,
    )


def _named(question: Question, irregular: Irregular, name: str) -> Question:
    """The relative of somebody with a name (POSS-10)."""
    owner = canonical(name)
    return replace(
        question,
        facts=(*question.facts, f"{question.facts[0]}/{owner}"),
        lemma_ids=(*question.lemma_ids, owner),
        rule_ids=(*question.rule_ids, "POSS-10"),
        depth=2,
        ask=f'{question.ask.partition(". Form:")[0]} and the name "{owner}". Form: {name}\'s.',
        rule="; ".join(part for part in ("the name stands first", question.rule) if part),
        answer=WORDS,
        accept=tuple(f"{owner} {form}" for form in question.accept),
        prompt_forms=(*question.prompt_forms, owner),
        floor_forms=(*(f"{owner} {form}" for form in question.floor_forms), owner, *question.floor_forms),
    )


def _write(number: int) -> Question:
    words = numeral(number)
    return Question(
        family="exceptions",
        facts=(number_fact(number),),
        cells=("exception|nineteen",),
        lemma_ids=(str(number),),
        rule_ids=("NUM-02", "NUM-05") if number > 100 else ("NUM-02",),
        depth=sum(digit != "0" for digit in str(number)),
        ask=f"Write the number {number} in Dakota words.",
        rule=_NINETEEN,
        answer=WORDS,
        accept=words,
        floor_forms=(
            words[0].replace("uŋma", "ake"),
            words[0].replace("uŋma", "wikćemna saŋpa"),
            words[0].removesuffix(" uŋma napćiŋwaŋka"),
        ),
        number=number,
    )


def _read(number: int) -> Question:
    words = numeral(number)[0]
    return replace(
        _write(number),
        ask=f'Which number is "{words}" in Dakota? Answer in digits.',
        answer=NUMBER,
        accept=(str(number),),
        prompt_forms=(words,),
        floor_forms=(),
    )
