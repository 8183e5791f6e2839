"""Verbs and adjectives in a person and a mode, just as the other families ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from dakota1890.corpus import SentenceWord, Verb, load_corpus
from dakota1890.families import conjugate as verbs
from dakota1890.families import objects, particles
from dakota1890.families.particles import PARTICLES
from dakota1890.families.sentences.parts import Part, particle, together
from dakota1890.morphology import object_pairs
from dakota1890.questions import Question

COMMANDS = {
    "wo": "a man to one person",
    "ye": "a woman to one person",
    "po": "a man to several",
    "pe": "a woman to several",
}
STATEMENTS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "future": ("kta",),
    "negative": ("šni",),
    "question": ("he",),
    "negative question": ("šni", "he"),
}
"""Mode -> what follows the verb. What kta becomes before he is not recorded."""

_MODES = {**STATEMENTS, **{command: (command,) for command in COMMANDS}}
_THEM = "3pl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicate:
    """A verb, or an adjective that says something, in a person and a mode. `them`: with the marker of several
    animate objects.
    """

    word: SentenceWord
    person: str
    mode: str
    part: Part
    them: bool = False


def predicates(word: SentenceWord) -> Iterator[Predicate]:
    """Everything that the record licenses of a verb, or of an adjective that is in the table of verbs."""
    verb = next((verb for verb in load_corpus().verbs if verb.lemma == word.word), None)
    if verb is None:
        return
    for person in ("3sg", *verb.persons):
        for mode in _MODES:
            question = _asked(verb, person, mode)
            if question is not None:
                yield _predicate(word, verb, person, mode, question)
        if "object" in verb.derives and (person, _THEM) in object_pairs(verb):
            for mode in STATEMENTS:
                question = _asked_with_them(verb, person, mode)
                if question is not None:
                    yield replace(_predicate(word, verb, person, mode, question), them=True)


def _asked(verb: Verb, person: str, mode: str) -> Question | None:
    """How the other families ask for the form, without the question particle; None if it is not licensed."""
    if mode in COMMANDS:
        return _commands().get(f"{verbs.fact(verb, person)}/{mode}")
    if mode in ("plain", "question"):
        return _before_question(verbs.question(verb, person), mode)
    return particles.question(verb, person, _MODES[mode][0]) if _settled(verb, person) else None


def _asked_with_them(verb: Verb, person: str, mode: str) -> Question | None:
    """The same with the marker of several animate objects."""
    if mode in ("plain", "question"):
        return _before_question(objects.question(verb, person, _THEM), mode)
    return objects.question(verb, person, _THEM, _MODES[mode][0]) if _settled(verb, person) else None


def _before_question(question: Question, mode: str) -> Question | None:
    # What the question particle does to a final a is not recorded.
    return None if mode == "question" and question.accept[0].endswith(("a", "aŋ")) else question


def _settled(verb: Verb, person: str) -> bool:
    """Whether the record says what kta and šni do to the end of the form."""
    return person.endswith("pl") or verb.final != "unknown"


@lru_cache(maxsize=1)
def _commands() -> Mapping[str, Question]:
    """The fact that a command is about -> its question."""
    assert PARTICLES.recorded is not None
    return {q.facts[-1]: q for q in PARTICLES.recorded() if q.facts[-1].rpartition("/")[2] in COMMANDS}


def _predicate(word: SentenceWord, verb: Verb, person: str, mode: str, question: Question) -> Predicate:
    after = _MODES[mode]
    asking = after[-1:] if mode.endswith("question") else ()
    forms = tuple((*form.split(), *asking) for form in question.accept)
    following = [particle(word) for word in after]
    how = verbs.introduce(verb).partition(f"({verb.gloss})")[2]
    changes = ", a becomes e" if verb.final == "changes" and after[:1] in (("kta",), ("šni",)) else ""
    plain = Part(
        forms=((verb.lemma,),),
        shown=(forms[0][0],),
        given=(f"{verb.lemma} ({word.english[0]}{how}{changes})",),
        plain=(verb.lemma,),
    )
    part = replace(
        together(plain, *following),
        forms=forms,
        lemma_ids=question.lemma_ids,
        rule_ids=(*question.rule_ids, *(("SYN-04",) if asking else ())),
        facts=question.facts,
        cells=question.cells,
        rule=question.rule,
    )
    return Predicate(word=word, person=person, mode=mode, part=part)
