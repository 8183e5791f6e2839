"""Questions about a verb with an object, and about derived verbs.

Derived verbs mean to do it for another person, to one's own, to oneself, and to cause it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from dakota1890.corpus import Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.families import conjugate as verbs
from dakota1890.invented import GLOSS, invented_verb, is_new
from dakota1890.morphology.objects import (
    DERIVED_VERBS,
    object_pairs,
    reflexive,
    reflexive_persons,
    with_object,
)
from dakota1890.morphology.verbs import conjugate
from dakota1890.orthography import canonical
from dakota1890.questions import FORM, Family, Question

OBJECT_NAMES = {person.person: person.object for person in load_corpus().persons}
_OBJECT_MARKERS = {"1sg": "ma", "2sg": "ni", "1pl": "uŋ (uŋk before a vowel)", "2pl": "ni", "3pl": "wića"}
_MADE = {
    "dative": ("dative (to somebody)", "VERB-28"),
    "benefactive": ("benefactive (for somebody)", "VERB-28"),
    "possessive": ("possessive (one's own)", "POSS-11"),
    "absolute": ("absolute (to things in general)", "VERB-30"),
    "causative": ("causative", "VERB-27"),
}
"""Name and rule of each kind of derived verb."""
_CLASSES_WITH_OBJECT = ("I", "II")
_INSTRUMENTS = ("ka", "ya", "yu")

Cell = tuple[str, Any]
"""Subject and object, person of the reflexive, or person of a derived verb."""
QuestionAndFinal = tuple[Question, str]
"""Question without a particle, and the change of its final a before one."""


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    return [question for verb in load_corpus().verbs for question in _questions(verb)]


def _questions(verb: Verb) -> Iterator[Question]:
    for kind in verb.derives:
        for cell in _cells(verb, kind):
            question = _ask(verb, kind, cell)
            yield from (verbs.followed(verb, *question, particle) for particle in _particles(question))


def _invent(draws: Draws) -> Question:
    while True:
        verb = invented_verb(draws)
        kinds = _invented_kinds(verb)
        if not kinds:
            continue
        kind = draws.pick(kinds)
        question = _ask(verb, kind, draws.pick(_cells(verb, kind)))
        if is_new(question[0].accept):
            return verbs.followed(verb, *question, draws.pick(_particles(question)))


OBJECTS = Family(name="objects", recorded=_recorded, invent=_invent)


def _invented_kinds(verb: Verb) -> list[str]:
    """Return the kinds that the rules license for an invented verb of this shape."""
    if verb.klass not in _CLASSES_WITH_OBJECT or verb.persons[0] != "1sg":
        return []
    kinds = ["object", "object"]
    if verb.klass == "I" and not verb.at:
        kinds += ["dative", "benefactive"]
    if verb.klass == "I" and verb.at:
        kinds += ["benefactive", "possessive", "absolute"]
    if not verb.at and verb.lemma[:2] in _INSTRUMENTS:
        kinds += ["possessive", "absolute"] if verb.klass == "II" else ["possessive"]
    if not verb.lemma.endswith(("a", "aŋ")):
        kinds.append("causative")
    return kinds


def _cells(verb: Verb, kind: str) -> list[Cell]:
    """Return the forms of one kind that can be asked of `verb`."""
    if kind == "object":
        # "They ... you all" is spelled like two other pairs; three prompts with one answer would reward a
        # constant.
        return [pair for pair in object_pairs(verb) if pair != ("3pl", "2pl")]
    if kind == "reflexive":
        return [(person, None) for person in reflexive_persons(verb)]
    return [(person, made) for made in DERIVED_VERBS[kind](verb) for person in ("3sg", *made.persons)]


def _ask(verb: Verb, kind: str, cell: Cell) -> QuestionAndFinal:
    if kind == "object":
        return _object(verb, *cell)
    if kind == "reflexive":
        return _reflexive(verb, cell[0])
    return _made(verb, kind, *cell)


def _particles(question: QuestionAndFinal) -> list[str]:
    """Return kta and šni if the record licenses their effect on the end of the form."""
    return ["", *verbs.PARTICLES] if question[1] != "unknown" else [""]


def _plain(
    verb: Verb, meaning: str, *, rule_ids: Sequence[str], lemmas: Sequence[str] = (), **fields: Any
) -> Question:
    """Ask for a form of `verb`; `meaning` describes it."""
    return Question(
        family="objects",
        lemma_ids=(verb.lemma, *lemmas),
        rule_ids=(*verb.rules, *rule_ids),
        ask=f"{verbs.introduce(verb)}. Form: {meaning}.",
        answer=FORM,
        prompt_forms=(verb.lemma,),
        floor_forms=(verb.lemma,),
        invented=verb.gloss == GLOSS,
        **fields,
    )


def _object(verb: Verb, subject: str, obj: str) -> QuestionAndFinal:
    form = with_object(verb, subject, obj)
    fused = subject == "1sg" and obj.startswith("2")
    marked = not subject.startswith("3") and not fused
    question = _plain(
        verb,
        f"{verbs.PERSON_NAMES[subject]} (subject), {OBJECT_NAMES[obj]} (object)",
        rule=_fused_rule(obj) if fused else _object_rule(verb, subject, obj),
        accept=(form,),
        facts=(*((verbs.fact(verb, subject),) if marked else ()), _object_fact(verb, subject, obj)),
        cells=(
            *((verbs.cell(verb, subject),) if marked else ()),
            *((verbs.cell(verb, "1pl"),) if obj == "1pl" else ()),
            f"{subject}>{obj}|{verbs.class_name(verb)}",
        ),
        rule_ids=(
            "VERB-15",
            *(("VERB-16",) if marked else ()),
            *(("PHON-07", "PHON-03") if fused else ()),
            *(("VERB-12",) if form.endswith("pi") else ()),
        ),
        depth=2 if marked or fused or subject == "3pl" else 1,
    )
    return question, "keeps" if form.endswith("pi") else verb.final


def _object_fact(verb: Verb, subject: str, obj: str) -> str:
    """Return the name of the fact; pairs that are spelled alike share it, so that they are on one side."""
    if obj == "1pl":
        return verbs.fact(verb, "1pl")
    if obj[0] == "2" and subject[0] == "3" and (obj, subject) != ("2sg", "3sg"):
        return f"{verbs.fact(verb, '3pl')}>2"
    return f"{verbs.fact(verb, subject)}>{obj}"


def _fused_rule(obj: str) -> str:
    plural = " plus final -pi" if obj == "2pl" else ""
    return f'"I" and "{OBJECT_NAMES[obj]}" together are ći{plural}, after which k before a vowel becomes ć'


def _object_rule(verb: Verb, subject: str, obj: str) -> str:
    plural = " plus final -pi" if obj in ("1pl", "2pl") and not subject.endswith("pl") else ""
    marker = f'"{OBJECT_NAMES[obj]}" is {_OBJECT_MARKERS[obj]}{plural}'
    if subject in ("12", "1pl"):
        marker += ", wića loses its a and comes first"
    elif not subject.startswith("3"):
        marker += " and comes first"
    at = "at the place of the marker" if verb.at else "before the verb"
    return f"{verbs.person_rule(verb, subject)}; {marker}, {at}"


def _made(verb: Verb, kind: str, person: str, made: Verb) -> QuestionAndFinal:
    """Ask for `made`, a verb derived from `verb`, in `person`."""
    meaning, rule_id = _MADE[kind]
    suffix = made.lemma.removeprefix(verb.lemma) if kind == "causative" else ""
    kind, meaning = f"{kind} {suffix}".strip(), f"{meaning} in -{suffix}" if suffix else meaning
    recorded = made.lemma in _recorded_lemmas()
    # `conjugate` also uses the names of a derived word that is in the lexicon.
    derivation = f"{made.lemma}/gloss" if recorded else f"{verb.lemma}/{kind}"
    in_person = (verbs.fact(made, person),) if recorded else (derivation, verbs.fact(made, person))
    cell, bare = f"{kind}|{verbs.class_name(verb)}", person == "3sg"
    rule = _made_rule(verb, kind, suffix)
    question = _plain(
        verb,
        f"{verbs.PERSON_NAMES[person]}, {meaning}",
        rule=f"{rule}; {verbs.person_rule(made, person)}",
        accept=conjugate(made, person),
        facts=(derivation,) if bare else in_person,
        cells=(cell,) if bare else (cell, verbs.cell(made, person)),
        rule_ids=(
            rule_id,
            *(("PHON-03",) if "k becomes ć" in rule else ()),
            *(("VERB-03",) if made.klass == "ki" and person[0] in "12" else ()),
            *verbs.number_rules(person),
        ),
        depth=1 if bare else 2,
        lemmas=(made.lemma,) if recorded else (),
    )
    return question, "keeps" if person.endswith("pl") else made.final


def _made_rule(verb: Verb, kind: str, suffix: str) -> str:
    at = "at the place of the marker" if verb.at else "before the verb"
    softened = ", whose k becomes ć" if verb.lemma[0] == "k" else ""
    if suffix:
        markers = ", and person markers stand right before that ya" if suffix == "ya" else ""
        return f"the causative adds {suffix}{markers}"
    if kind == "possessive" and not verb.at:
        return f'for "one\'s own" hd takes the place of the first {verb.lemma[0]}'
    return {
        "dative": f"the dative puts ki before the verb{softened}",
        "benefactive": f"the benefactive puts kići {at}{softened}",
        "possessive": 'for "one\'s own" ki stands at the place of the marker',
        "absolute": "with no object in mind wa stands before the verb",
    }[kind]


def _reflexive(verb: Verb, person: str) -> QuestionAndFinal:
    question = _plain(
        verb,
        f"{verbs.PERSON_NAMES[person]}, reflexive (oneself)",
        rule=_reflexive_rule(verb, person),
        accept=(reflexive(verb, person),),
        facts=(f"{verb.lemma}/reflexive/{person}",),
        cells=(f"reflexive|{verbs.class_name(verb)}", f"{person}|reflexive"),
        rule_ids=("VERB-29", "PRON-10", *verbs.number_rules(person)),
        depth=1 if person == "3sg" else 2,
    )
    return question, "keeps" if person.endswith("pl") else verb.final


def _reflexive_rule(verb: Verb, person: str) -> str:
    owner = "12" if person in ("12", "1pl") else person[0]
    plural = " plus final -pi" if person.endswith("pl") else ""
    name = verbs.PERSON_NAMES[person]
    if verb.at:
        marker = {"1": "mići", "2": "nići", "12": "uŋkići"}[owner]
        return f'for "{name}" {marker} (self) stands at the place of the marker{plural}'
    before = {"1": "m", "2": "n", "3": "nothing", "12": "uŋk"}[owner]
    return (
        f"for oneself ihd takes the place of the first {verb.lemma[0]}, "
        f'with {before} before it for "{name}"{plural}'
    )


@lru_cache(maxsize=1)
def _recorded_lemmas() -> frozenset[str]:
    """Return the verbs that have their own entry in the dictionary."""
    return frozenset(
        canonical(entry.form) for entry in load_corpus().entries if entry.pos in ("v.a.", "v.n.")
    )
