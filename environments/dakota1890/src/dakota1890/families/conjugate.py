"""Questions about a verb in a person."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from dakota1890.corpus import Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.invented import GLOSS, invented_verb
from dakota1890.morphology.verbs import conjugate, with_particle
from dakota1890.questions import FORM, Family, Question, unique

PERSON_NAMES = {person.person: person.subject for person in load_corpus().persons}
PARTICLES = {frame.name: frame for frame in load_corpus().frames if frame.use == "particle"}
"""kta and šni, the most frequent words after a verb."""
FINAL_PI = " plus final -pi"
_MARKERS = {"I": {"1": "wa", "2": "ya"}, "III": {"1": "ma", "2": "ni"}}


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    return [question(verb, person) for verb in load_corpus().verbs for person in _persons(verb)]


def _persons(verb: Verb) -> list[str]:
    """Return the persons that change the word.

    The third person is the lemma, and its plural the lemma with -pi: if asked here, one affix would answer a
    sixth of the questions. `particles` asks for it with other changes.
    """
    return [person for person in verb.persons if not person.startswith("3")]


def _invent(draws: Draws) -> Question:
    verb = invented_verb(draws)
    return question(verb, draws.pick(_persons(verb)))


CONJUGATE = Family(name="conjugate", recorded=_recorded, invent=_invent)


def question(verb: Verb, person: str) -> Question:
    """Ask for `verb` in `person`."""
    return Question(
        family="conjugate",
        facts=(fact(verb, person),),
        cells=(cell(verb, person),),
        lemma_ids=(verb.lemma,),
        rule_ids=(*verb.rules, *number_rules(person)),
        depth=1,
        ask=f"{introduce(verb)}. Form: {PERSON_NAMES[person]}.",
        rule=person_rule(verb, person),
        answer=FORM,
        accept=conjugate(verb, person),
        prompt_forms=(verb.lemma,),
        floor_forms=(verb.lemma,),
        invented=verb.gloss == GLOSS,
    )


def followed(verb: Verb, plain: Question, final: str, particle: str) -> Question:
    """Ask for the form of `plain` with kta or šni after it, or alone; `final` is what its final a does."""
    if not particle:
        return plain
    frame = PARTICLES[particle]
    changes = f", final a becomes e before {particle}" if final == "changes" else ""
    introduced, _, meaning = plain.ask.removesuffix(".").partition(". Form: ")
    return plain.with_added(
        facts=(f"{plain.facts[-1]}/{particle}",),
        cells=(f"{particle}|{verb.klass}, final a {final}",),
        rule_ids=(frame.rule_id,),
        depth=plain.depth + 1,
        ask=f"{introduced}{changes}. Form: {meaning}, {frame.meaning}.",
        rule=f"{plain.rule}; {frame.rule}",
        accept=unique([form for bare in plain.accept for form in with_particle(bare, final, particle)]),
        floor_forms=(verb.lemma, frame.around(verb.lemma)),
    )


def fact(verb: Verb, person: str) -> str:
    """Return the name of the fact that gives the spelling of `verb` for `person`."""
    return f"{verb.lemma}/{verb.klass}/{person}"


def cell(verb: Verb, person: str) -> str:
    """Return the cell: person x class of the verb."""
    return f"{person}|{class_name(verb)}"


def class_name(verb: Verb) -> str:
    """Return the class; verbs with a marker inside the stem are a separate class."""
    return f"{verb.klass}, inside" if verb.at else verb.klass


def number_rules(person: str) -> tuple[str, ...]:
    """Return the rules for -pi and the dual that `person` needs."""
    return ("VERB-12",) if person in ("2pl", "3pl") else ("VERB-13",) if person in ("12", "1pl") else ()


def introduce(verb: Verb) -> str:
    """Return `Dakota verb "kaška" (to bind, tie), class I, marker at the start`.

    Without a recorded class, return the bare verb.
    """
    named = name(verb)
    return named if verb.klass == "unknown" else f"{named}, class {verb.klass}, {_place(verb)}"


def name(verb: Verb) -> str:
    """Return `Dakota verb "kaška" (to bind, tie)`."""
    return f'Dakota verb "{verb.lemma}" ({verb.gloss})'


def _place(verb: Verb) -> str:
    """Return the position of the person marker as text."""
    before, marker = verb.lemma[: verb.at], {"II": "y", "ki": "ki"}.get(verb.klass, "marker")
    where = f'{marker} after "{before}"' if before else f"{marker} at the start"
    return where if verb.dual_at == verb.at else f'{where}, "we" at the start'


def person_rule(verb: Verb, person: str) -> str:
    """Return the rule that marks `person` in the class of `verb`."""
    name, plural = PERSON_NAMES[person], FINAL_PI if person.endswith("pl") else ""
    if person == "3sg":
        return f'"{name}" has no marker'
    if person == "3pl":
        return f'"{name}" is only a final -pi'
    if person in ("12", "1pl"):
        if verb.klass == "II" and verb.lemma[verb.at :].startswith("yu"):
            return f'"{name}" is uŋ in place of yu{plural}'
        return f'"{name}" is uŋ (uŋk before a vowel){plural}'
    if verb.klass == "II":
        return f'"{name}" turns y into {"md" if person[0] == "1" else "d"}{plural}'
    if verb.klass == "ki":
        return f'"{name}" turns ki into {"we" if person[0] == "1" else "ye"}{plural}'
    return f'"{name}" is {_MARKERS[verb.klass][person[0]]}{plural}'
