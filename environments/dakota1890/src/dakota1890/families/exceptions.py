"""Questions about forms that the rules get wrong: only evaluated, and never asked in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from dakota1890.corpus import Frame, Irregular, load_corpus
from dakota1890.families import numerals
from dakota1890.families.conjugate import PERSON_NAMES
from dakota1890.families.possess import OWNER_NAMES
from dakota1890.morphology.numerals import numeral
from dakota1890.orthography import canonical
from dakota1890.questions import FORM, WORDS, Family, Question

_WORDS_FOR = {"verb": "verb", "noun": "noun", "kin": "kin term", "number": "number"}
_NAMES = {"his or her": ("Ćaske", "Hepaŋ", "Winona", "Hapaŋ"), "his": ("Hepi", "Ćataŋ", "Hake")}
"""Names of children; names of sons if only a man has such a relative."""

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
    uses = ["particle"] if irregular.particles == "yes" else []
    if irregular.kind == "verb" and irregular.meaning.startswith("2"):
        uses.append("prohibition")
    yield from (_framed(question, frame) for frame in load_corpus().frames if frame.use in uses)
    if irregular.kind == "kin" and irregular.meaning in _NAMES:
        yield from (_named(question, name) for name in _NAMES[irregular.meaning])


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
        # The regular form is the mistake that this family tests, so similarity to it is not rewarded.
        floor_forms=(*shown, *irregular.regular),
    )


def _framed(question: Question, frame: Frame) -> Question:
    """Ask for the form with words around it."""
    return question.with_added(
        facts=(f"{question.facts[0]}/{frame.name}",),
        rule_ids=(frame.rule_id,),
        depth=2,
        ask=f"{question.ask[:-1]}, {frame.meaning}.",
        rule=f"{question.rule}; {frame.rule}",
        accept=tuple(map(frame.around, question.accept)),
        floor_forms=tuple(map(frame.around, question.floor_forms)) + question.floor_forms,
    )


def _named(question: Question, name: str) -> Question:
    """Ask for the relative of a person with a name (POSS-10)."""
    owner = canonical(name)
    return question.with_added(
        facts=(f"{question.facts[0]}/{owner}",),
        lemma_ids=(owner,),
        rule_ids=("POSS-10",),
        depth=2,
        ask=f'{question.ask.partition(". Form:")[0]} and the name "{owner}". Form: {name}\'s.',
        rule="; ".join(part for part in ("the name stands first", question.rule) if part),
        answer=WORDS,
        accept=tuple(f"{owner} {form}" for form in question.accept),
        prompt_forms=(*question.prompt_forms, owner),
        floor_forms=(*(f"{owner} {form}" for form in question.floor_forms), owner, *question.floor_forms),
    )


def _write(number: int) -> Question:
    question = numerals.write(number)
    words = question.accept[0]
    wrong = [words.replace("uŋma", other) for other in ("ake", "wikćemna saŋpa")]
    return _of_nineteen(question, number, (*wrong, words.removesuffix(" uŋma napćiŋwaŋka")))


def _read(number: int) -> Question:
    return _of_nineteen(numerals.read(number, numeral(number)[0]), number, ())


def _of_nineteen(question: Question, number: int, floor_forms: tuple[str, ...]) -> Question:
    """Return a question of `numerals` as a question about the exception."""
    return replace(
        question,
        family="exceptions",
        cells=("exception|nineteen",),
        rule_ids=("NUM-02", "NUM-05") if number > 100 else ("NUM-02",),
        rule=_NINETEEN,
        floor_forms=floor_forms,
    )
