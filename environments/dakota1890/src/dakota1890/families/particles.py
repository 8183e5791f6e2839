"""Questions about the words around the verb: time, negation, commands, habit, and purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from dakota1890.corpus import Frame, Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.families import conjugate as verbs
from dakota1890.invented import GLOSS, invented_verb
from dakota1890.morphology.sounds import can_contract, contract
from dakota1890.questions import Family, Question
from dakota1890.splits import side_of

_MOTION_VERBS = ("ya", "hi")


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    return [question for verb in load_corpus().verbs for question in _questions(verb)]


def _questions(verb: Verb) -> list[Question]:
    questions = [question(verb, *cell) for cell in _cells_of(verb)]
    questions += [_framed(verb, *cell) for cell in _framed_cells(verb)]
    if can_contract(verb.lemma) and verb.klass != "III":
        questions += [_purpose(verb, *going) for going in _goings()]
    return questions


def _invent(draws: Draws) -> Question:
    verb = invented_verb(draws)
    kind = draws.below(8)
    if kind < 3:
        return question(verb, *draws.pick(_cells_of(verb)))
    if kind < 6 and can_contract(verb.lemma) and verb.klass != "III":
        return _purpose(verb, *draws.pick(_train_goings()))
    return _framed(verb, *draws.pick(_framed_cells(verb)))


PARTICLES = Family(name="particles", recorded=_recorded, invent=_invent)


def _cells_of(verb: Verb) -> list[tuple[str, str]]:
    """Return the (person, particle) pairs whose form the record licenses."""
    persons = [p for p in ("3sg", *verb.persons) if p.endswith("pl") or verb.final != "unknown"]
    return [(person, particle) for person in persons for particle in verbs.PARTICLES]


def _framed_cells(verb: Verb) -> list[tuple[str, Frame]]:
    """Return the (person, frame) pairs whose form the record licenses.

    It does not record the effect of nuŋ and s'a on a final a, nor the form of kiŋ after a final e.
    """
    state = verb.klass == "III"
    cells = [] if state else [("3sg", frame) for frame in _frames("command", "participle")]
    for person in ("3sg", *verb.persons):
        in_a = not person.endswith("pl") and verb.lemma.endswith(("a", "aŋ"))
        cells += [(person, frame) for frame in _frames("person") if frame.name == "waŋna" or not in_a]
        in_e = not person.endswith("pl") and verb.lemma.endswith("e")
        if person[0] == "2" and not state and not in_e:
            cells += [(person, frame) for frame in _frames("prohibition")]
    return cells


def _frames(*uses: str) -> list[Frame]:
    return [frame for frame in load_corpus().frames if frame.use in uses]


def question(verb: Verb, person: str, particle: str) -> Question:
    """Ask for `verb` in `person` followed by `particle`."""
    final = "keeps" if person.endswith("pl") else verb.final
    return verbs.followed(verb, _plain(verb, person), final, particle)


def _plain(verb: Verb, person: str) -> Question:
    return replace(verbs.question(verb, person), family="particles")


def _framed(verb: Verb, person: str, frame: Frame) -> Question:
    """Ask for `verb` in `person` within `frame`; commands and participles have no person."""
    plain = _plain(verb, person)
    framed = plain.with_added(
        facts=(f"{plain.facts[0]}/{frame.name}",),
        cells=(f"{frame.name}|{verbs.class_name(verb)}",),
        rule_ids=(frame.rule_id,),
        depth=2,
        ask=f"{plain.ask[:-1]}, {frame.meaning}.",
        rule=f"{plain.rule}; {frame.rule}",
        accept=tuple(map(frame.around, plain.accept)),
        floor_forms=(verb.lemma, frame.around(verb.lemma)),
    )
    if frame.use not in ("command", "participle"):
        return framed
    ask = f"{verbs.name(verb)}. Form: {frame.meaning}."
    return replace(framed, rule_ids=(frame.rule_id,), depth=1, ask=ask, rule=frame.rule)


@lru_cache(maxsize=1)
def _goings() -> list[tuple[Verb, str, str]]:
    """Return the motion verbs, persons and particles that can express a purpose."""
    motions = [verb for verb in load_corpus().verbs if verb.lemma in _MOTION_VERBS]
    return [(verb, person, p) for verb in motions for person in ("1sg", "2sg") for p in verbs.PARTICLES]


@lru_cache(maxsize=1)
def _train_goings() -> list[tuple[Verb, str, str]]:
    """Return those for questions with an invented verb, which must not contain held-out facts."""
    return [going for going in _goings() if side_of(question(*going)) == "train"]


def _purpose(verb: Verb, motion: Verb, person: str, particle: str) -> Question:
    """Ask for `motion` in order to do `verb`, which is contracted (PHON-04, SYN-05): `waŋyag mde kta`."""
    going = question(motion, person, particle)
    first, ending = contract(verb.lemma), verb.lemma[-2:]
    meaning = verbs.PARTICLES[particle].meaning
    purpose = going.with_added(
        facts=(f"{verb.lemma}/contracted",),
        cells=(f"contracted|ends in {ending}",),
        rule_ids=("PHON-04", "SYN-05"),
        depth=3,
        ask=(
            f"{verbs.name(verb)}. {going.ask.partition('. Form:')[0]}. "
            f'Form: {verbs.PERSON_NAMES[person]}, "{motion.lemma}" in order to do "{verb.lemma}", {meaning}.'
        ),
        rule=(
            f"the verb of purpose comes first, without its last vowel, and {ending[0]} before it "
            f"becomes {first[-1]}; {going.rule}"
        ),
        accept=tuple(f"{first} {form}" for form in going.accept),
        prompt_forms=(verb.lemma, motion.lemma),
        floor_forms=(verb.lemma, f"{verb.lemma} {motion.lemma} {particle}"),
        invented=verb.gloss == GLOSS,
    )
    return replace(purpose, lemma_ids=(verb.lemma, *going.lemma_ids))
