"""Verbs and adjectives in a person and a mode, in the forms that the other families ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dakota1890.corpus import SentenceWord, Verb, load_corpus
from dakota1890.families import conjugate as verbs
from dakota1890.families import particles
from dakota1890.families.sentences.parts import Part, join_parts, particle
from dakota1890.questions import Question

STATEMENTS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "future": ("kta",),
    "negative": ("šni",),
    "question": ("he",),
    "negative question": ("šni", "he"),
}
"""Words after the verb in each mode. The form of kta before he is not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicate:
    """Verb, or predicative adjective, in a person and a mode."""

    word: SentenceWord
    person: str
    mode: str
    part: Part


def predicates(word: SentenceWord) -> Iterator[Predicate]:
    """Yield all licensed predicates of a verb, or of an adjective that is in the table of verbs."""
    verb = next((verb for verb in load_corpus().verbs if verb.lemma == word.word), None)
    if verb is None:
        return
    for person in ("3sg", *verb.persons):
        for mode in STATEMENTS:
            question = _verb_question(verb, person, mode)
            if question is not None:
                yield _predicate(word, verb, person, mode, question)


def _verb_question(verb: Verb, person: str, mode: str) -> Question | None:
    """Return the other families' question for the form, or None if the form is not licensed.

    The question has no question particle.
    """
    if mode in ("plain", "question"):
        question = verbs.question(verb, person)
        # The effect of the question particle on a final a is not recorded.
        return None if mode == "question" and question.accept[0].endswith(("a", "aŋ")) else question
    if verb.final == "unknown" and not person.endswith("pl"):
        return None  # the effect of kta and šni on the end of this form is not recorded
    return particles.question(verb, person, STATEMENTS[mode][0])


def _predicate(word: SentenceWord, verb: Verb, person: str, mode: str, question: Question) -> Predicate:
    after = STATEMENTS[mode]
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
        join_parts(plain, *following),
        forms=forms,
        lemma_ids=question.lemma_ids,
        rule_ids=(*question.rule_ids, *(("SYN-04",) if asking else ())),
        facts=question.facts,
        cells=question.cells,
        rule=question.rule,
    )
    return Predicate(word=word, person=person, mode=mode, part=part)
