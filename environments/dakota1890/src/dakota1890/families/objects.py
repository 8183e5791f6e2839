"""A verb with an object, and verbs made of it: for somebody, to one's own, to oneself, to cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dakota1890.corpus import Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.families import conjugate as verbs
from dakota1890.invented import GLOSS, invented_verb, is_new
from dakota1890.morphology import (
    absolute,
    benefactive,
    causative,
    conjugate,
    dative,
    object_pairs,
    possessive,
    reflexive,
    reflexive_persons,
    with_object,
    with_particle,
)
from dakota1890.orthography import canonical
from dakota1890.questions import FORM, Family, Question, unique

OBJECT_NAMES = {"1sg": "me", "2sg": "thee", "1pl": "us", "2pl": "you all", "3pl": "them"}
_OBJECT_MARKERS = {"1sg": "ma", "2sg": "ni", "1pl": "uŋ (uŋk before a vowel)", "2pl": "ni", "3pl": "wića"}
_PARTICLES = {"": ("", ""), **verbs.PARTICLE_WORDS}
_CLASSES_WITH_OBJECT = ("I", "II")
_INSTRUMENTS = ("ka", "ya", "yu")
_SOFTENED = ", whose k becomes ć"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What is asked of a verb: a form in words, the forms, the rule, and what the form is about."""

    meaning: str
    rule: str
    forms: tuple[str, ...]
    final: str
    facts: tuple[str, ...]
    cells: tuple[str, ...]
    rule_ids: tuple[str, ...]
    depth: int
    lemmas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of form: its (subject, object) or (person, suffix) pairs for a verb, and how to ask for one."""

    cells: Callable[[Verb], Sequence[tuple[str, str]]]
    ask: Callable[[Verb, tuple[str, str]], _Asked]


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    return [question for verb in load_corpus().verbs for question in _questions(verb)]


def _questions(verb: Verb) -> Iterator[Question]:
    for name in verb.derives:
        kind = _KINDS[name]
        for cell in kind.cells(verb):
            asked = kind.ask(verb, cell)
            yield from (_question(verb, asked, particle) for particle in _particles(asked))


def _invent(draws: Draws) -> Question:
    while True:
        verb = invented_verb(draws)
        kinds = _invented_kinds(verb)
        if not kinds:
            continue
        kind = _KINDS[draws.pick(kinds)]
        asked = kind.ask(verb, draws.pick(kind.cells(verb)))
        question = _question(verb, asked, draws.pick(_particles(asked)))
        if is_new(question.accept):
            return question


OBJECTS = Family(name="objects", recorded=_recorded, invent=_invent)


def question(verb: Verb, subject: str, obj: str, particle: str = "") -> Question:
    """Ask for `verb` with a subject and an object, and kta or šni after it."""
    return _question(verb, _object(verb, (subject, obj)), particle)


def _invented_kinds(verb: Verb) -> list[str]:
    """The kinds that the rules license for an invented verb of this shape."""
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


def _particles(asked: _Asked) -> list[str]:
    """kta and šni follow only where the record says what they do to the end of the form."""
    return list(_PARTICLES) if asked.final != "unknown" else [""]


def _question(verb: Verb, asked: _Asked, particle: str) -> Question:
    name, rule_id = _PARTICLES[particle]
    forms, changes = asked.forms, ""
    if particle:
        forms = unique([form for bare in forms for form in with_particle(bare, asked.final, particle)])
        changes = f", final a becomes e before {particle}" if asked.final == "changes" else ""
    return Question(
        family="objects",
        facts=(*asked.facts, f"{asked.facts[-1]}/{particle}") if particle else asked.facts,
        cells=(*asked.cells, f"{particle}|{verb.klass}, final a {asked.final}") if particle else asked.cells,
        lemma_ids=(verb.lemma, *asked.lemmas),
        rule_ids=(*verb.rules, *asked.rule_ids, rule_id) if particle else (*verb.rules, *asked.rule_ids),
        depth=asked.depth + bool(particle),
        ask=f"{verbs.introduce(verb)}{changes}. Form: {asked.meaning}{particle and f', {name}'}.",
        rule=f"{asked.rule}; {particle} follows for the {name}" if particle else asked.rule,
        answer=FORM,
        accept=forms,
        prompt_forms=(verb.lemma,),
        floor_forms=(verb.lemma, f"{verb.lemma} {particle}") if particle else (verb.lemma,),
        invented=verb.gloss == GLOSS,
    )


def _object_cells(verb: Verb) -> list[tuple[str, str]]:
    # "They ... you all" is spelled like two other pairs; three prompts with one answer would pay a constant.
    return [pair for pair in object_pairs(verb) if pair != ("3pl", "2pl")]


def _object(verb: Verb, cell: tuple[str, str]) -> _Asked:
    subject, obj = cell
    form = with_object(verb, subject, obj)
    fused = subject == "1sg" and obj.startswith("2")
    marked = not subject.startswith("3") and not fused
    return _Asked(
        meaning=f"{verbs.PERSON_NAMES[subject]} (subject), {OBJECT_NAMES[obj]} (object)",
        rule=_fused_rule(obj) if fused else _object_rule(verb, subject, obj),
        forms=(form,),
        final="keeps" if form.endswith("pi") else verb.final,
        facts=(*((verbs.fact(verb, subject),) if marked else ()), _object_fact(verb, subject, obj)),
        cells=(
            *((verbs.cell(verb, subject),) if marked else ()),
            *((verbs.cell(verb, "1pl"),) if obj == "1pl" else ()),
            f"{subject}>{obj}|{verbs.class_name(verb)}",
        ),
        rule_ids=_object_rule_ids(subject, obj, fused=fused, plural=form.endswith("pi")),
        depth=2 if marked or fused or subject == "3pl" else 1,
    )


def _object_fact(verb: Verb, subject: str, obj: str) -> str:
    """The name of the fact; pairs that are spelled alike share it, so that they stand on one side."""
    if obj == "1pl":
        return verbs.fact(verb, "1pl")
    if obj[0] == "2" and subject[0] == "3" and (obj, subject) != ("2sg", "3sg"):
        return f"{verbs.fact(verb, '3pl')}>2"
    return f"{verbs.fact(verb, subject)}>{obj}"


def _object_rule_ids(subject: str, obj: str, *, fused: bool, plural: bool) -> tuple[str, ...]:
    order = ("VERB-16",) if not subject.startswith("3") and not fused else ()
    one_pi = ("VERB-12",) if plural else ()
    return ("VERB-15", *order, *(("PHON-07", "PHON-03") if fused else ()), *one_pi)


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


def _dative(verb: Verb, cell: tuple[str, str]) -> _Asked:
    rule = "the dative puts ki before the verb" + (_SOFTENED if verb.lemma[0] == "k" else "")
    return _made(verb, dative(verb), cell[0], "dative", "dative (to somebody)", rule, "VERB-28")


def _benefactive(verb: Verb, cell: tuple[str, str]) -> _Asked:
    at = "at the place of the marker" if verb.at else "before the verb"
    rule = f"the benefactive puts kići {at}" + (_SOFTENED if verb.lemma[0] == "k" else "")
    return _made(
        verb, benefactive(verb), cell[0], "benefactive", "benefactive (for somebody)", rule, "VERB-28"
    )


def _possessive(verb: Verb, cell: tuple[str, str]) -> _Asked:
    rule = 'for "one\'s own" ki stands at the place of the marker'
    if not verb.at:
        rule = f'for "one\'s own" hd takes the place of the first {verb.lemma[0]}'
    return _made(verb, possessive(verb), cell[0], "possessive", "possessive (one's own)", rule, "POSS-11")


def _absolute(verb: Verb, cell: tuple[str, str]) -> _Asked:
    rule = "with no object in mind wa stands before the verb"
    meaning = "absolute (to things in general)"
    return _made(verb, absolute(verb), cell[0], "absolute", meaning, rule, "VERB-30")


def _causative(verb: Verb, cell: tuple[str, str]) -> _Asked:
    person, suffix = cell
    rule = f"the causative adds {suffix}"
    if suffix == "ya":
        rule += ", and person markers stand right before that ya"
    made = causative(verb, suffix)
    return _made(verb, made, person, f"causative {suffix}", f"causative in -{suffix}", rule, "VERB-27")


def _causative_cells(verb: Verb) -> list[tuple[str, str]]:
    # What kiya does after a final vowel differs from verb to verb, so it is asked only after ŋ.
    suffixes = ("ya", "kiya") if verb.lemma.endswith("ŋ") else ("ya",)
    return [(person, s) for s in suffixes for person in ("3sg", *causative(verb, s).persons)]


def _persons_of(make: Callable[[Verb], Verb]) -> Callable[[Verb], list[tuple[str, str]]]:
    return lambda verb: [(person, "") for person in ("3sg", *make(verb).persons)]


def _made(verb: Verb, made: Verb, person: str, kind: str, meaning: str, rule: str, rule_id: str) -> _Asked:
    """`made`, which is made of `verb`, in `person`."""
    recorded = made.lemma in _recorded_lemmas()
    # The dictionary and `conjugate` also ask for a derived word that is in the lexicon, by these names.
    derivation = f"{made.lemma}/gloss" if recorded else f"{verb.lemma}/{kind}"
    in_person = (verbs.fact(made, person),) if recorded else (derivation, verbs.fact(made, person))
    cell, bare = f"{kind}|{verbs.class_name(verb)}", person == "3sg"
    return _Asked(
        meaning=f"{verbs.PERSON_NAMES[person]}, {meaning}",
        rule=f"{rule}; {verbs.person_rule(made, person)}",
        forms=conjugate(made, person),
        final="keeps" if person.endswith("pl") else made.final,
        facts=(derivation,) if bare else in_person,
        cells=(cell,) if bare else (cell, verbs.cell(made, person)),
        rule_ids=(
            rule_id,
            *(("PHON-03",) if _SOFTENED in rule else ()),
            *(("VERB-03",) if made.klass == "ki" and person[0] in "12" else ()),
            *verbs.number_rules(person),
        ),
        depth=1 if bare else 2,
        lemmas=(made.lemma,) if recorded else (),
    )


def _reflexive(verb: Verb, cell: tuple[str, str]) -> _Asked:
    person = cell[0]
    return _Asked(
        meaning=f"{verbs.PERSON_NAMES[person]}, reflexive (oneself)",
        rule=_reflexive_rule(verb, person),
        forms=(reflexive(verb, person),),
        final="keeps" if person.endswith("pl") else verb.final,
        facts=(f"{verb.lemma}/reflexive/{person}",),
        cells=(f"reflexive|{verbs.class_name(verb)}", f"{person}|reflexive"),
        rule_ids=("VERB-29", "PRON-10", *verbs.number_rules(person)),
        depth=1 if person == "3sg" else 2,
    )


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
    """The verbs that the dictionary lists under themselves."""
    return frozenset(
        canonical(entry.form) for entry in load_corpus().entries if entry.pos in ("v.a.", "v.n.")
    )


_KINDS = {
    "object": _Kind(_object_cells, _object),
    "dative": _Kind(_persons_of(dative), _dative),
    "benefactive": _Kind(_persons_of(benefactive), _benefactive),
    "possessive": _Kind(_persons_of(possessive), _possessive),
    "absolute": _Kind(_persons_of(absolute), _absolute),
    "causative": _Kind(_causative_cells, _causative),
    "reflexive": _Kind(lambda verb: [(person, "") for person in reflexive_persons(verb)], _reflexive),
}
